"""Text in and out: the tokenizer, conversations, and streaming that never cuts a character."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...errors import EngineError, InputError
from .channels import SHOWN, has_channels
from .chat_template import ChatTemplate
from .messages import Message, check_messages
from .special_text import Marks, SpecialText, encoded

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
HALF = "\ufffd"  # what half a character decodes to
MOST_HELD = 64  # tokens; a character has at most four bytes, so text that is still broken by then stays broken
MOST_AT_ONCE = 32  # tokens that are decoded together


class EngineTokenizer:
    """The tokenizer of an engine and its chat template, if it has one."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        special: Mapping[str, str],
        shown: Collection[str] = (),
    ):
        """special: the named special tokens that a template sees, such as bos_token. shown: names of special tokens
        that are text of an output; so are marks of channels where a model answers in them: nobody could read it
        without."""
        tokenizer.no_truncation()  # settings of the file that would silently cut or pad prompts
        tokenizer.no_padding()
        self.tokenizer, self.chat_template, self.special = tokenizer, chat_template, dict(special)
        self._shown = {*shown, *(SHOWN if has_channels(chat_template) else ())}
        self._template = None if chat_template is None else ChatTemplate(chat_template, special)

    @classmethod
    def load(cls, directory: Path, special: Mapping[str, str]) -> "EngineTokenizer":
        """Read tokenizer.json and chat_template.jinja of an engine directory. Raises EngineError."""
        try:
            tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"{directory / TOKENIZER}: expected a tokenizer, got {error}") from None
        template = directory / CHAT_TEMPLATE
        return cls(tokenizer, template.read_text(encoding="utf-8") if template.is_file() else None, special)

    def encode(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model wants around it. parse_special: whether a special
        token that the text has the name of becomes one. Raises InputError."""
        return self._encode(text, True, parse_special)

    def encode_part(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Token ids of a piece of text, without any special token around it. Raises InputError."""
        return self._encode(text, False, parse_special)

    def _encode(self, text: str, around: bool, parse_special: bool) -> list[int]:
        if parse_special:
            return encoded(self.tokenizer, _utf8(text), around).ids
        return self._special_text.encode(_utf8(text), around)

    def encode_messages(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        name: str = "prompt",
        *,
        parse_special: bool = False,
    ) -> list[int]:
        """Token ids of a conversation in the chat template, ready for the assistant's answer.

        Args:
            chat_template_kwargs: variables of the template, such as `enable_thinking`.
            name: stands at the start of an error.
            parse_special: whether special tokens that messages or variables have the names of become tokens. Otherwise
                those alone do that the template writes; variables that are special tokens, as bos_token, are its own.

        Raises:
            InputError: messages of another shape, an engine without a chat template, or messages that it refuses.
        """
        check_messages(messages, name)
        try:  # the template writes BOS itself
            if parse_special:
                return self.encode_part(self.render(messages, chat_template_kwargs))
            return self._encode_as_text(messages, chat_template_kwargs)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    def _encode_as_text(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None) -> list[int]:
        """Token ids of a conversation in which special tokens are the template's alone. Raises InputError."""
        marks = Marks(self._special_text)
        text = _utf8(self.render(messages, arguments, marks.put))
        return self._special_text.encode_rendered(text, marks)

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self.tokenizer, self.chat_template or "")

    def render(
        self,
        messages: Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        rewrite: Callable[[Any], Any] = lambda data: data,
    ) -> str:
        """The text of a checked conversation, ready for the assistant's answer. rewrite: see `ChatTemplate.render`.
        Raises InputError."""
        if self._template is None:
            raise InputError("chat: expected a model with a chat template, got one without; use a raw prompt")
        return self._template.render(messages, chat_template_kwargs, rewrite)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        plain = [token for token in tokens if token not in self.special_ids]
        return self.tokenizer.decode(plain, skip_special_tokens=False)

    def text_of(self, tokens: Sequence[int]) -> str:
        """As `decode`, but of bytes that are no text it makes what a stream of the tokens shows."""
        return TextStream(self).push(tokens, last=True)

    def showing(self, names: Collection[str]) -> "EngineTokenizer":
        """The same, but for special tokens of these names, which it does not leave out of what it decodes."""
        if not self.special_names.keys() & ({*names} - self._shown):
            return self
        return EngineTokenizer(self.tokenizer, None, {}, self._shown | {*names})

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that `decode` leaves out."""
        return frozenset(id for name, id in self.special_names.items() if name not in self._shown)

    @cached_property
    def special_names(self) -> dict[str, int]:
        """Names of special tokens, each with its id."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: id for id, token in added if token.special}


def _utf8(text: str) -> str:
    """Refuse text that no UTF-8 holds: half of a surrogate pair, as from JSON's "\\ud800"."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text: expected Unicode, got half a surrogate pair at character {error.start}") from None
    return text


class TextStream:
    """Turns tokens into text as they come. Holds back what may still change: an unfinished UTF-8 character.

    The text depends on the tokens alone, not on how many come at once: it is what one push a token gives. A push
    decodes the tokens of this push and the last only, however long the text is.
    """

    def __init__(self, tokenizer: EngineTokenizer):
        self._tokenizer = tokenizer
        self._context: list[int] = []  # decoded before what is held, so that joining rules see their left context
        self._held: list[int] = []  # tokens whose text was not handed out, or not all of it
        self._shown = 0  # characters of theirs that were

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Add tokens -> the text that is final now. With `last`, all that is left."""
        # Special tokens have no text. As context they would hide the word before them.
        plain = [token for token in tokens if token not in self._tokenizer.special_ids]
        starts = range(0, len(plain), MOST_AT_ONCE)
        text = "".join(self._push_some(plain[start : start + MOST_AT_ONCE]) for start in starts)
        return text + self._rest() if last else text

    def _push_some(self, tokens: list[int]) -> str:
        """Add tokens: at once where that gives what one after the other does, for that is faster."""
        held = self._held + tokens
        if len(held) < MOST_HELD:
            now = self._decoded(held)
            if HALF not in now:
                return self._hand_out(held, now)
        return "".join(map(self._push_one, tokens))

    def _push_one(self, token: int) -> str:
        held = [*self._held, token]
        now = self._decoded(held)
        if not now.endswith(HALF) or len(held) >= MOST_HELD:
            return self._hand_out(held, now)
        self._held, now = held, now.rstrip(HALF)
        new, self._shown = now[self._shown :], max(self._shown, len(now))
        return new

    def _rest(self) -> str:
        return self._hand_out(self._held, self._decoded(self._held)) if self._held else ""

    def _hand_out(self, held: list[int], now: str) -> str:
        """Take the text of what is held as final -> what of it was not shown."""
        new = now[self._shown :]
        self._context, self._held, self._shown = held, [], 0
        return new

    def _decoded(self, held: list[int]) -> str:
        """The text of what is held, behind its context. A byte that is no text spoils all bytes that it follows, as
        SentencePiece has them: then it is that of what is held alone."""
        before, whole = (self._tokenizer.decode(tokens) for tokens in (self._context, self._context + held))
        now = whole[len(before) :]
        if whole.startswith(before) and HALF not in now:
            return now
        alone = self._tokenizer.decode(held)
        # A context of a space alone has no text of its own, so what was spoiled of it shows in the count.
        return now if whole.startswith(before) and now.count(HALF) <= alone.count(HALF) else alone

"""Text in and out: the tokenizer, the chat template, and streaming that never cuts a character."""

from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ..errors import EngineError, InputError

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


class Text:
    """The tokenizer of an engine and its chat template, if it has one."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None, special: dict[str, str]):
        """special: the named special tokens a template may use, such as bos_token."""
        self.tokenizer, self.chat_template, self._special = tokenizer, chat_template, special

    @classmethod
    def load(cls, directory: Path, special: dict[str, str]) -> "Text":
        """Read tokenizer.json and chat_template.jinja of an engine directory."""
        try:
            tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        except Exception as error:  # the library raises bare Exception
            raise EngineError(f"{directory / TOKENIZER}: expected a tokenizer, got {error}") from None
        template = directory / CHAT_TEMPLATE
        return cls(tokenizer, template.read_text() if template.is_file() else None, special)

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of a prompt; with `chat` as the user's turn of a conversation, ready for the answer."""
        if not chat:
            return self.tokenizer.encode(text).ids
        return self.tokenizer.encode(self.render([{"role": "user", "content": text}]), add_special_tokens=False).ids

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Apply the chat template to messages with `role` and `content`."""
        if self.chat_template is None:
            raise InputError("chat: expected a model with a chat template, got one without; use a raw prompt")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise InputError(f"chat: the model's chat template refused the messages: {error}") from None

    def decode(self, tokens: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class TextStream:
    """Turns tokens into text as they come. Holds back what may still change: an unfinished UTF-8 character."""

    def __init__(self, text: Text):
        self._text = text
        self._tokens: list[int] = []
        self._start = 0  # tokens from here on are decoded together, so that joining rules see their left context
        self._sent = 0  # tokens whose text was handed out

    def push(self, tokens: list[int], last: bool = False) -> str:
        """Add tokens -> the text that is final now. With `last`, all that is left."""
        self._tokens += tokens
        before = self._text.decode(self._tokens[self._start : self._sent])
        now = self._text.decode(self._tokens[self._start :])
        if now.endswith("\ufffd") and not last:
            return ""
        self._start, self._sent = self._sent, len(self._tokens)
        return now[len(before) :]

"""Answers in the two forms of OpenAI's API: a chat's message and a completion's text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from ..report import TokenLogprobs
from ..runtime.text.token_text import TokenText
from ..runtime.text.tokenizer import TextStream
from .tools.answer_reader import AnswerReader
from .tools.conversation import Reading

Json = dict[str, Any]


class AnswerForm(Protocol):
    """How choices look. An instance belongs to one call: it may count what it wrote."""

    prefix: str  # of the id
    whole_object: str
    chunk_object: str

    def begin(self, index: int) -> Json | None:
        """What comes before the first token of a choice, in a stream."""

    def grown(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        """A choice in a chunk: the text that is new, and the log-probabilities of its tokens. None for nothing yet."""

    def end(self, index: int, reason: str) -> Json:
        """The last of a choice in a stream."""

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str) -> Json:
        """A choice that was not streamed."""


class ChatForm:
    """chat.completion and chat.completion.chunk."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokens: TokenText | None, logprobs: bool, reading: Reading | None = None):
        """reading: how answers are read that may have reasoning or calls; None: they are text."""
        self._tokens, self._logprobs, self._reading = tokens, logprobs, reading
        self._readers: dict[int, AnswerReader] = {}  # of each choice

    def begin(self, index: int) -> Json | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def grown(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        told = self._told(logprobs)
        delta = {"content": text} if self._reading is None else _delta(self._reader(index), text)
        if not delta and told is None:
            return None
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": None}

    def end(self, index: int, reason: str) -> Json:
        delta = {}
        if self._reading is not None:
            reader = self._reader(index)
            delta, reason = _delta(reader, "", last=True), self._reading.reason(reader, reason)
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if self._reading is not None:
            reader = self._reader(index)
            reader.push(text, last=True)
            message |= _message(reader)
            reason = self._reading.reason(reader, reason)
        return {"index": index, "message": message, "logprobs": self._told(logprobs), "finish_reason": reason}

    def _reader(self, index: int) -> AnswerReader:
        assert self._reading is not None
        if index not in self._readers:
            self._readers[index] = self._reading.reader()
        return self._readers[index]

    def _told(self, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if not self._logprobs or self._tokens is None:
            return None
        content = [
            self._token(each.token_id, each.logprob) | {"top_logprobs": [self._token(*likely) for likely in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Json:
        assert self._tokens is not None
        written = self._tokens.of(token)
        return {"token": written.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(written)}


def _message(reader: AnswerReader) -> Json:
    """What a message has of an answer that was read."""
    answer = reader.answer
    calls = [
        _call(call.custom, call.arguments, (id, call.name)) for id, call in zip(reader.ids, answer.calls, strict=True)
    ]
    message: Json = {"content": answer.content if answer.content or not calls else None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _delta(reader: AnswerReader, text: str, last: bool = False) -> Json:
    """What a message grows by with a text."""
    grown = reader.push(text, last)
    delta: Json = {"reasoning_content": grown.reasoning, "content": grown.content}
    delta = {name: text for name, text in delta.items() if text}
    calls = [
        {"index": index, **_call(reader.answer.calls[index].custom, arguments, new)}
        for index, new, arguments in grown.calls
    ]
    return delta | ({"tool_calls": calls} if calls else {})


def _call(custom: bool, text: str, new: tuple[str, str] | None) -> Json:
    """A call, or what it grew by. new: its id and name, None where they were told."""
    kind, given = ("custom", "input") if custom else ("function", "arguments")
    if new is None:
        return {kind: {given: text}}
    id, name = new
    return {"id": id, "type": kind, kind: {"name": name, given: text}}


class CompletionForm:
    """text_completion."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokens: TokenText | None, logprobs: int | None, echoed: Sequence[str]):
        """echoed: the text ahead of each choice, or nothing."""
        self._tokens, self._logprobs, self._echoed = tokens, logprobs, echoed
        self._streams: dict[int, TextStream] = {}  # of each choice, token by token
        self._offsets: Counter[int] = Counter()  # of its next token in its text

    def begin(self, index: int) -> Json | None:
        return self._choice(index, self._echoed[index], None, None) if self._echoed else None

    def grown(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> Json:
        return self._choice(index, text, self._told(index, logprobs), None)

    def end(self, index: int, reason: str) -> Json:
        return self._choice(index, "", None, reason)

    def whole(self, index: int, text: str, logprobs: Sequence[TokenLogprobs], reason: str) -> Json:
        echoed = self._echoed[index] if self._echoed else ""
        return self._choice(index, echoed + text, self._told(index, logprobs), reason)

    def _choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _told(self, index: int, logprobs: Sequence[TokenLogprobs]) -> Json | None:
        if self._logprobs is None or self._tokens is None:
            return None
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        written = self._streams.setdefault(index, TextStream(self._tokens.tokenizer))
        for each in logprobs:
            text = self._text(each.token_id)
            told["tokens"].append(text)
            told["token_logprobs"].append(each.logprob)
            likely = {self._text(token): logprob for token, logprob in each.top}
            told["top_logprobs"].append({**likely, text: each.logprob})
            told["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(written.push([each.token_id]))
        return told

    def _text(self, token: int) -> str:
        """A part of a character is written as its bytes, so that no two tokens have one name."""
        assert self._tokens is not None
        written = self._tokens.of(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)

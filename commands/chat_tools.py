"""Tools in a conversation in the terminal: told to the model, its answers read, its calls printed."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..runtime.asked.sampling_params import GREEDY, SamplingParams
from ..runtime.calls.template import TemplateTools
from ..runtime.calls.written import WrittenCall
from ..runtime.stream import Stream
from ..serving.api_error import ApiError
from ..serving.tools.asked import tools_of
from ..serving.tools.conversation import Reading, grammar_of, reading_of, shown_text, shown_tools
from ..serving.tools.custom import INPUT
from .files import read
from .terminal import say

if TYPE_CHECKING:
    from ..runtime.asked.request import Request
    from ..runtime.engine import Engine
    from ..runtime.text.messages import Message
    from ..runtime.text.tokenizer import EngineTokenizer

Json = dict[str, Any]


def given_tools(file: str | None) -> list[Json]:
    """OpenAI's list of tools that --tools names. Raises InputError."""
    if file is None:
        return []
    try:
        tools = json.loads(read("tools", file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"tools: {file}: expected JSON, got what is none ({error})") from None
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise InputError(f"tools: {file}: expected OpenAI's list of tools, got another form")
    return tools


class ChatTools:
    """What a model may call, none or some, and how its answers are read. See `serving.tools.conversation.Model`."""

    def __init__(self, engine: "Engine", tools: list[Json], tool_format: str | None = None):
        """tool_format: the form of calls, None for the engine's. Raises InputError for tools that nobody could call."""
        self.tokenizer, self._engine, self._told, self._form = engine.tokenizer, engine, tools, tool_format
        if tool_format is not None:
            _ = self.tools
        try:
            self._asked = tools_of(tools, None, None)
        except ApiError as error:
            raise InputError(str(error)) from None

    @cached_property
    def tools(self) -> TemplateTools:
        """See `Model`."""
        return self._engine.tools.over(self._form)

    @cached_property
    def shown_text(self) -> "EngineTokenizer":
        """The tokenizer of answers that are read."""
        return shown_text(self.tokenizer)

    def encode(self, messages: Sequence["Message"], arguments: Json) -> list[int]:
        """Token ids of a conversation, ready for the answer. Raises InputError."""
        if not self._asked:
            return self.tokenizer.encode_messages(messages, arguments)
        plain = [dict(message) for message in messages]
        return self.tokenizer.encode_messages(*shown_tools(self, plain, arguments, self._told, True))

    def reading(self, tokens: Sequence[int]) -> Reading | None:
        """How the answer to a prompt is read, None for one that is text."""
        return reading_of(self, self._asked, tokens)

    def sampling(self, sampling: SamplingParams | None, reading: Reading | None) -> SamplingParams | None:
        """What was asked for, with what holds calls in their form. Raises InputError."""
        if self._asked is None or reading is None:
            return sampling
        sampling = sampling or GREEDY
        try:
            held = grammar_of(self, self._asked, reading, sampling.structured)
        except ApiError as error:
            raise InputError(str(error)) from None
        return dataclasses.replace(sampling, structured=held)

    def stream(self, engine: "Engine", request: "Request", reading: Reading | None) -> Stream:
        """The pieces of an answer, with the marks by which it is read."""
        if reading is None:
            return engine.submit(request)
        request.stop_text = request.stop_text and request.stop_text.over(self.shown_text)
        return Stream(request, engine.run([request]), self.shown_text)


class Printed:
    """An answer as it is printed: reasoning, text, and calls."""

    def __init__(self, reading: Reading | None):
        self._reader = None if reading is None else reading.reader()
        self._text = ""
        self._last = ""  # kind of what was printed

    def push(self, text: str, last: bool = False) -> None:
        """Print what a text adds, with `last` the rest."""
        if self._reader is None:
            self._text += text
            say(text, end="")
            return
        grown = self._reader.push(text, last)
        self._print("reasoning", grown.reasoning)
        self._print("text", grown.content)
        for index, new, arguments in grown.calls:
            self._print(f"call {index}", f"{new[1]} {arguments}" if new else arguments)

    def _print(self, kind: str, text: str) -> None:
        if text:
            apart = "\n\n" if self._last and self._last != kind else ""
            say(apart + text, end="")
            self._last = kind

    @property
    def is_cut(self) -> bool:
        """Whether it ended within a call."""
        return self._reader is not None and any(not call.is_whole for call in self._reader.answer.calls[-1:])

    def message(self) -> Json:
        """What was said as a message of the assistant, empty for nothing."""
        if self._reader is None:
            return {"role": "assistant", "content": self._text} if self._text else {}
        answer = self._reader.answer
        message: Json = {"role": "assistant", "content": answer.content or None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(*each) for each in zip(self._reader.ids, answer.calls, strict=True)]
        return message if answer.content or answer.calls else {}


def _call(id: str, call: WrittenCall) -> Json:
    """A call as templates see it: of a function, its arguments data where they are whole."""
    try:
        arguments = {INPUT: call.arguments} if call.custom else json.loads(call.arguments)
    except (ValueError, RecursionError):  # of an answer that was cut
        arguments = call.arguments
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

"""A conversation with tools: what the model is shown of them, and how its answer is held and read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import InputError
from ...runtime.calls.channel_calls import ChannelCalls, described, one_call_each
from ...runtime.calls.formats import FORMATS, HARMONY, HERMES
from ...runtime.calls.template import TemplateTools
from ...runtime.calls.tool import Tool, Tools
from ...runtime.calls.written import ToolFormat
from ...runtime.text.channels import Channels, has_channels
from ...runtime.text.reasoning import MARKS, Reasoning, reasoning_of
from ...runtime.text.tokenizer import EngineTokenizer
from ..api_error import ApiError
from .answer_reader import AnswerReader
from .custom import as_function
from .grammar import LEAD, answer_grammar, document_of

Json = dict[str, Any]


class ToldModel(Protocol):
    """A model that may be told of tools."""

    @property
    def tokenizer(self) -> EngineTokenizer:
        """Its own."""

    @property
    def tools(self) -> TemplateTools:
        """How it is told of tools, and writes calls. Raises InputError where nobody knows."""


@dataclass(frozen=True)
class Reading:
    """How an answer is read: what of it is reasoning, and which calls in which form it may have."""

    reasoning: Reasoning | None
    tools: Tools | None
    form: ToolFormat

    @property
    def thinks(self) -> Reasoning | Channels | None:
        """What of the answer is reasoning."""
        return Channels() if isinstance(self.form, ChannelCalls) else self.reasoning

    def reader(self) -> AnswerReader:
        """One for a choice."""
        return AnswerReader(self.reasoning, self.tools, self.form)

    def reason(self, reader: AnswerReader, reason: str) -> str:
        """The `finish_reason` of a choice: a call that the client named is no news to it, and one that a stop string
        cut is not to be run."""
        calls = reader.answer.calls
        called = self.tools is not None and not self.tools.named and calls and calls[-1].is_whole
        return "tool_calls" if called and reason == "stop" else reason


def shown_text(text: EngineTokenizer) -> EngineTokenizer:
    """The tokenizer of answers that are read: it shows the marks of reasoning, of calls and of channels."""
    forms = " ".join(form.write("f", {}) for form in FORMATS.values() if form is not HARMONY)
    marks = {LEAD, *(mark for pair in MARKS for mark in pair)}
    return text.showing({name for name in text.special_names if name and (name in marks or name in forms)})


def reading_of(model: ToldModel, tools: Tools | None, prompt: Sequence[int]) -> Reading | None:
    """None for answers that are text alone. Raises InputError."""
    text = model.tokenizer
    reasoning = reasoning_of(text, prompt)
    if isinstance(reasoning, Channels):
        return Reading(None, tools, HARMONY if tools is None else model.tools.form)
    if tools is None:
        return None if reasoning is None else Reading(reasoning, None, HERMES)
    return Reading(reasoning, tools, model.tools.form)


def grammar_of(model: ToldModel, tools: Tools, reading: Reading, structured: Mapping[str, Any] | None) -> Json:
    """What holds an answer that may have calls, as `SamplingParams.structured` takes it. Raises ApiError."""
    for tool in tools.tools:
        _check_input(tool, reading.form)
    if structured is not None and not structured.keys() & {"json", "json_object"}:
        got = next(iter(structured))
        raise ApiError(400, f"tools: expected a JSON schema at most beside them, got {got}", param="tools")
    document = document_of(structured)
    grammar = answer_grammar(tools, reading.form, reading.reasoning, model.tokenizer, document)
    return {"grammar": grammar, "whole": isinstance(reading.form, ChannelCalls)}


def _check_input(tool: Tool, form: ToolFormat) -> None:
    """Refuse a custom tool's grammar that the model's form of calls cannot hold. Raises ApiError."""
    if tool.grammar is not None and tool.grammar.syntax not in form.holds:
        can = " or ".join(["text", *(f"a {syntax} grammar" for syntax in form.holds)])
        raise ApiError(
            400,
            f"tools: {tool.name}: format: expected {can}, which this model's form of calls can hold, got a "
            f"{tool.grammar.syntax} grammar; describe the text in the tool's description, or give a function",
            param="tools",
        )


def shown_tools(
    model: ToldModel, messages: Sequence[Json], arguments: Json, tools: list[Json], callable_: bool
) -> tuple[list[Json], Json]:
    """Messages and variables for a chat template, with the tools in them: as its own variable, or, for a template that
    knows none, in the system message, with earlier calls as text. callable_: whether the answer may call one. Raises
    InputError."""
    tools = [as_function(tool) for tool in tools]
    if has_channels(model.tokenizer.chat_template):
        messages, tools = one_call_each(messages), described(tools)
    listed = {"tools": tools, **arguments} if tools else arguments
    try:
        known = model.tools
    except InputError:
        if callable_:
            raise
        return list(messages), listed
    shown = list(messages) if known.keeps else _as_texts(messages, known.form)
    if known.lists or not tools or not callable_:
        return shown, listed
    words = told(known.form, tools)
    role = "system" if shown[0]["role"] in ("system", "developer") else _first_role(model)
    if shown[0]["role"] in ("system", "developer", role):
        first, rest = shown[0], shown[1:]
        shown = [{**first, "content": _joined(first["content"], words, first["role"] == "user")}, *rest]
    else:
        shown = [{"role": role, "content": words}, *shown]
    return shown, arguments


def _first_role(model: ToldModel) -> str:
    """The role of a message that holds instructions: user for a template that refuses a system message."""
    try:
        model.tokenizer.render([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    except InputError:
        return "user"
    return "system"


def _joined(content: str | list[Json], words: str, ahead: bool) -> str | list[Json]:
    """A message's content with more words, which come ahead of what a user asks."""
    if isinstance(content, str):
        return f"{words}\n\n{content}" if ahead else f"{content}\n\n{words}"
    part = {"type": "text", "text": words}
    return [part, *content] if ahead else [*content, part]


def _as_texts(messages: Sequence[Json], form: ToolFormat) -> list[Json]:
    """Messages for a template without tools: calls and their results are text of assistant and user. Results that
    follow one another are one message, for the template may want the two to take turns."""
    shown: list[Json] = []
    for index, message in enumerate(messages):
        if message["role"] != "tool":
            shown.append(_as_text(message, form))
            continue
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        result = f"<tool_response>\n{text}\n</tool_response>"
        if index and messages[index - 1]["role"] == "tool":
            shown[-1]["content"] += f"\n{result}"
        else:
            shown.append({"role": "user", "content": result})
    return shown


def _as_text(message: Json, form: ToolFormat) -> Json:
    """A message of which calls are text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = message.get("content") or ""
    said = content if isinstance(content, str) else "".join(part["text"] for part in content)
    written = [form.write(name, given) for name, given in map(_call, calls)]
    return {"role": "assistant", "content": "\n".join(filter(None, [said, *written]))}


def _call(call: Json) -> tuple[str, Json]:
    """A call's name and arguments, which the client may have sent as anything."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", {})
    return str(function.get("name", "")), arguments if isinstance(arguments, dict) else {"text": arguments}


def told(form: ToolFormat, tools: list[Json]) -> str:
    """What a model without tools in its template is told of them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.write("NAME", {"ARGUMENT": ".."})
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments in this form:\n{example}"
    )

"""Calls, reasoning and text in the channels of an answer, as gpt-oss writes them (harmony)."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..asked.lark import channel_rules, literal, schema_term
from ..text.channels import CALL, CHANNEL, CONSTRAIN, MESSAGE, ChannelMessage, channel_messages
from ..text.tokenizer import EngineTokenizer
from .tool import Tool, Tools
from .written import ReadAnswer, WrittenCall, json_end

Json = dict[str, Any]
TO = "functions."  # ahead of a function's name, where a message is for it


@dataclass(frozen=True)
class ChannelCalls:
    """A call is a message to a function, and the last of an answer: of several the model was taught one at a time."""

    opening: str = f"{CHANNEL}commentary to={TO}"
    exact: bool = False
    leads: str = ""  # see `ToolFormat`
    holds: Sequence[str] = ("regex",)  # by the schema of a text in JSON

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolFormat`."""
        given = json.dumps(arguments, ensure_ascii=False)
        return f"{self.opening}{name} {CONSTRAIN}json{MESSAGE}{given}{CALL}"

    def rules(self, tools: Sequence[Tool], many: bool, tokenizer: EngineTokenizer) -> list[str]:
        """See `ToolFormat`."""
        rules = [_one_of("calls", "call", tools, tokenizer)]
        for index, tool in enumerate(tools):
            rules.append(f"call_{index}: {literal(tool.name, tokenizer)} given_{index}")
            rules.append(f"given_{index}: typed? {literal(MESSAGE, tokenizer)} arguments_{index}")
            rules.append(f"arguments_{index}: {schema_term(tool.parameters, lenient=not tool.strict)}")
        return rules

    def answer_rules(self, tools: Tools, text: str, tokenizer: EngineTokenizer) -> list[str]:
        """Rules of a whole answer: messages ahead of it, then a call, or `text` where no call must be. A call may name
        its function ahead of the channel as well."""
        last = f"{literal(self.opening, tokenizer)} calls | addressed{'' if tools.required else ' | final text'}"
        rules = [f"start: ahead* ({last})", *channel_rules(tokenizer)]
        rules += [] if tools.required else [f"text: {text}"]
        rules += [_one_of("addressed", "to", tools.tools, tokenizer)]
        for index, tool in enumerate(tools.tools):
            rules.append(f"to_{index}: {literal(f' to={TO}{tool.name}{CHANNEL}commentary', tokenizer)} given_{index}")
        return [*rules, *self.rules(tools.tools, tools.many, tokenizer)]

    def read(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """See `ToolFormat`."""
        return list(_calls(channel_messages(text, True)))

    def read_answer(self, text: str, tools: Tools | None, done: bool) -> ReadAnswer:
        """An answer so far, with `done` all of it. What is said ahead of a call is text; so is a call without tools."""
        messages = list(channel_messages(text, done))
        calls = [] if tools is None else list(_calls(messages))
        said = [each for each in messages if tools is None or not each.recipient.startswith(TO)]
        reasoning = [each.body for each in said if each.channel == "analysis"]
        content = [each.body for each in said if each.channel != "analysis"]
        return ReadAnswer("\n".join(filter(None, reasoning)), "\n".join(filter(None, content)), calls)


def one_call_each(messages: Iterable[Json]) -> list[Json]:
    """A conversation for a template that writes the first call of a message alone, and refuses text beside a call and
    its reasoning: each call a message, with its result behind it, and such text the end of the reasoning."""
    rest, told = deque(messages), list[Json]()
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or []
        if calls and message.get("reasoning_content") and message.get("content"):
            content = message["content"]
            said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            message = {**message, "content": None, "reasoning_content": f"{message['reasoning_content']}\n{said}"}
        if len(calls) < 2:
            told.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls:
            told += [{**message, "tool_calls": [call]}, *(each for each in results if _answers(each, call))]
            message = {"role": "assistant", "content": None}
        told += [each for each in results if not any(_answers(each, call) for call in calls)]
    return told


def described(tools: Sequence[Json]) -> list[Json]:
    """Tools for a template that fails on a function without a description."""
    functions = [tool.get("function") for tool in tools]
    return [
        {**tool, "function": {"description": "", **function}} if isinstance(function, dict) else tool
        for tool, function in zip(tools, functions, strict=True)
    ]


def _answers(result: Json, call: Json) -> bool:
    return bool(result.get("tool_call_id") == call.get("id"))


def _one_of(rule: str, each: str, tools: Sequence[Tool], tokenizer: EngineTokenizer) -> str:
    """A rule for a call of one of the tools, and what ends it."""
    return f"{rule}: ({' | '.join(f'{each}_{index}' for index in range(len(tools)))}) ({literal(CALL, tokenizer)})?"


def _calls(messages: Iterable[ChannelMessage]) -> Iterator[WrittenCall]:
    for message in messages:
        if message.recipient.startswith(TO):
            yield WrittenCall(message.recipient.removeprefix(TO), message.body[: json_end(message.body, 0)])

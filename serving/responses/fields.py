"""The body of POST /v1/responses, and the chat that it asks for."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ...errors import InputError
from ..api_error import ApiError
from ..field_errors import of_input
from ..fields import ChatRequest, Data, DataList, Fields, Label, Metadata

Json = dict[str, Any]
TEXTS = ("input_text", "output_text", "text")  # kinds of parts of a message
# Kinds of calls -> their kind in chats, and the field of what a call gives.
CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
ENCRYPTED = "reasoning.encrypted_content"  # what clients ask for that keep reasoning themselves; there is none


CHATS_PART = re.compile(r"^(tools\[\d+\])\.(?:function|custom)\b")  # where a chat has what a response's tool has itself
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


@contextmanager
def names_as_sent() -> Iterator[None]:
    """Within it, errors about the chat name the fields of the response."""
    try:
        yield
    except (ApiError, InputError) as error:
        told = of_input(error) if isinstance(error, InputError) else error
        detail = told.body["error"]
        sent = detail["param"] or ""
        name = NAMES.get(sent, CHATS_PART.sub(r"\1", sent))
        if name != sent:
            detail["message"] = detail["message"].replace(sent, name, 1)
            detail["param"] = name
        raise told from None


def _nothing_more(include: Any) -> Any:
    more = [each for each in include if each != ENCRYPTED] if isinstance(include, list) else [include]
    if more:
        raise ValueError(f"expected nothing more than {ENCRYPTED}, got {more[0]!r:.60}")
    return include


class TextOptions(Fields):
    """format: as `response_format` of chats, its fields side by side."""

    format: Data | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(Fields):
    """POST /v1/responses. What needs a memory of earlier calls is refused by name; `store` keeps nothing."""

    model: str | None = Field(None, max_length=256)
    input: str | DataList = Field(description="a text, or messages, calls and their outputs")
    instructions: str | None = Field(None, description="a system message ahead of the input")
    max_output_tokens: int | None = Field(None, ge=1, le=2**31, description="most tokens of the answer")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: Data | None = None
    text: TextOptions | None = Field(None, description="its form")
    tools: DataList | None = Field(None, description="functions and custom tools that the model may call")
    tool_choice: Literal["none", "auto", "required"] | Data | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = Field(None, description="taken; nothing is stored")
    include: Annotated[list[str], BeforeValidator(_nothing_more)] | None = Field(
        None, description="reasoning.encrypted_content alone; none is sent"
    )
    reasoning: Data | None = Field(None, description="its effort, for chat templates that know it")
    top_logprobs: Literal[0] | None = Field(None, description="0 alone")
    truncation: Literal["disabled"] | None = Field(None, description="the default alone")
    service_tier: Literal["auto", "default"] | None = Field(None, description="the default alone")
    chat_template_kwargs: Data | None = Field(None, description="variables of the chat template")
    user: Label | None = Field(None, description="taken, of no effect")
    safety_identifier: Label | None = Field(None, description="taken, of no effect")
    prompt_cache_key: Label | None = Field(None, description="taken, of no effect")
    metadata: Metadata | None = Field(None, description="taken, of no effect")

    def chat(self) -> ChatRequest:
        """The chat that it is. Raises ApiError, which names the field."""
        messages = self._messages()
        asked: Json = {
            "messages": [message for message, _ in messages],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools or [])] or None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text.format if self.text else None),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        try:
            return ChatRequest.model_validate(asked)
        except ValidationError as error:
            first = error.errors()[0]
            if first["loc"][0] == "reasoning_effort":
                raise _wrong("reasoning.effort", f"an effort, {first['msg']}") from None
            number = next((part for part in first["loc"] if isinstance(part, int)), None)
            item = None if number is None else messages[number][1]
            place = "input" if item is None else f"input[{item}]"
            raise _wrong(place, f"messages and calls, {first['msg']}") from None

    def _messages(self) -> list[tuple[Json, int | None]]:
        """Instructions and input as a conversation, with the item of the input that each message begins with; calls
        are part of the assistant's message ahead of them."""
        messages: list[tuple[Json, int | None]] = []
        if self.instructions:
            messages.append(({"role": "system", "content": self.instructions}, None))
        if isinstance(self.input, str):
            return [*messages, ({"role": "user", "content": self.input}, None)]
        thought: Json = {}
        for index, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "reasoning":
                told = "\n".join(_texts(f"input[{index}]", item.get("content") or item.get("summary") or []))
                thought = {"reasoning_content": "\n".join(filter(None, [*thought.values(), told]))}
            elif kind in CALLS:
                call = _call(index, item)
                if thought or not messages or messages[-1][0]["role"] != "assistant":
                    messages.append(({"role": "assistant", **thought}, index))
                    thought = {}
                messages[-1][0].setdefault("tool_calls", []).append(call)
            elif kind in ("function_call_output", "custom_tool_call_output"):
                output = item.get("output")
                text = output if isinstance(output, str) else "\n".join(_texts(f"input[{index}].output", output))
                messages.append(({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}, index))
            elif kind == "message":
                content = item.get("content")
                text = content if isinstance(content, str) else "\n".join(_texts(f"input[{index}].content", content))
                own = thought if item.get("role") == "assistant" else {}
                messages.append(({"role": item.get("role"), "content": text, **own}, index))
                thought = {}
            else:
                raise _wrong(f"input[{index}].type", f"a message, a call or its output, got {kind!r:.60}")
        return messages


def _texts(place: str, parts: Any) -> list[str]:
    if not isinstance(parts, list):
        raise _wrong(place, f"a text or a list of text parts, got {parts!r:.60}")
    for index, part in enumerate(parts):
        known = isinstance(part, Mapping) and part.get("type") in (*TEXTS, "reasoning_text", "summary_text")
        if not known or not isinstance(part.get("text"), str):
            raise _wrong(f"{place}[{index}]", f"a part of the type {', '.join(TEXTS)}, got {part!r:.60}")
    return [part["text"] for part in parts]


def _call(index: int, item: Json) -> Json:
    kind, given = CALLS[item["type"]]
    name, text = item.get("name"), item.get(given)
    if not isinstance(name, str) or not isinstance(text, str):
        raise _wrong(f"input[{index}]", f"a call with name and {given}, two texts")
    return {"id": str(item.get("call_id", "")), "type": kind, kind: {"name": name, given: text}}


def _tool(index: int, tool: Json) -> Json:
    """A tool as chats have it."""
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise _wrong(f"tools[{index}].type", f"function or custom, the kinds that are supported, got {kind!r:.60}")
    fields = {name: value for name, value in tool.items() if name != "type"}
    form = fields.get("format")
    if kind == "custom" and isinstance(form, Mapping) and form.get("type") == "grammar":
        fields["format"] = {"type": "grammar", "grammar": form}
    return {"type": kind, kind: fields}


def _choice(choice: Any) -> Any:
    """A choice as chats have it."""
    if not isinstance(choice, Mapping) or str(choice.get("type")) in choice:
        return choice
    if choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {name: choice[name] for name in choice if name != "type"}}
    return {"type": choice.get("type"), str(choice.get("type")): {"name": choice.get("name")}}


def _format(form: Json | None) -> Json | None:
    """The form of text as chats have it."""
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _wrong(place: str, expected: str) -> ApiError:
    return ApiError(400, f"{place}: expected {expected}", param=place)

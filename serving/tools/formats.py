"""The forms in which models write calls, and which of them a chat template has."""

import json
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...runtime.text.channels import has_channels
from ...runtime.text.tokenizer import EngineTokenizer
from .channel_calls import ChannelCalls
from .json_calls import JsonCalls
from .python_calls import PythonCalls
from .tagged_calls import TaggedCalls
from .written import ToolFormat, shows

PROBE = "specstep_probe"
HERMES = JsonCalls("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")

HARMONY = ChannelCalls()


def _listed(opening: str, end: str, gap: bool = False) -> JsonCalls:
    """Calls as a list of JSON objects behind a mark."""
    before, middle = '{"name": "', '", "arguments": '
    return JsonCalls(opening, before, middle, "}", begin=f"{opening}[", between=", ", end=end, gap=gap)


# Those that are told by more come first.
FORMATS: dict[str, ToolFormat] = {
    "deepseek-v3": JsonCalls(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": JsonCalls(
        opening="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "mistral": _listed("[TOOL_CALLS]", "]", gap=True),
    "mistral-args": JsonCalls(opening="[TOOL_CALLS]", before="[TOOL_CALLS]", middle="[ARGS]", after=""),
    "qwen3-coder": TaggedCalls(
        opening="<tool_call>",
        before="<tool_call>\n<function=",
        middle=">\n",
        key="<parameter=",
        value=">\n",
        value_end="\n</parameter>\n",
        after="</function>\n</tool_call>",
        between="\n",
    ),
    "glm-4.5": TaggedCalls(
        opening="<tool_call>",
        before="<tool_call>",
        middle="\n",
        key="<arg_key>",
        value="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        after="</tool_call>",
        between="\n",
    ),
    "phi-4": _listed("<|tool_call|>", "]<|/tool_call|>"),
    "nemotron": _listed("<TOOLCALL>", "]</TOOLCALL>"),
    "hermes": HERMES,
    "lfm2-json": _listed("<|tool_call_start|>", "]<|tool_call_end|>"),
    "lfm2": PythonCalls(opening="<|tool_call_start|>[", end="]<|tool_call_end|>"),
    "llama3": JsonCalls('{"name": "', '{"name": "', '", "parameters": ', "}", leads=True, alone=True),
    "pythonic": PythonCalls(opening="[", end="]", leads=True),
    "harmony": HARMONY,  # found by its channels
}


@dataclass(frozen=True)
class TemplateTools:
    """What a chat template knows of tools. form: how its model writes calls; lists: whether it shows the model which
    there are; keeps: whether it has a form for calls and results of earlier turns."""

    form: ToolFormat
    lists: bool
    keeps: bool


def template_tools(text: EngineTokenizer, form: ToolFormat | None = None) -> TemplateTools:
    """Find it by rendering. A template that knows no calls has Hermes' form. form: the one that the user names. Raises
    InputError for a form that is not known, and for one that is not the template's where either is in channels."""
    rendered = _rendered_call(text)
    keeps = PROBE in rendered
    if has_channels(text.chat_template):
        form = form or HARMONY
    form = form or next((each for each in FORMATS.values() if shows(each, rendered, PROBE)), None if keeps else HERMES)
    if form is not None:
        _check_channels(text, form)
        return TemplateTools(form, _lists_tools(text), keeps)
    raise InputError(
        f"tools: expected a chat template that writes calls as one of {', '.join(FORMATS)}, got {_around(rendered)!r}; "
        "tool-format says which one to take"
    )


def _check_channels(text: EngineTokenizer, form: ToolFormat) -> None:
    """Refuse a form that the user named, where it or the template has channels and not both."""
    if has_channels(text.chat_template) != (form is HARMONY):
        name = next(name for name, each in FORMATS.items() if each is form)
        raise InputError(
            f"tools: expected harmony for a chat template with channels, and for no other, got {name}; leave "
            "tool-format out, and the template says its form"
        )


def _lists_tools(text: EngineTokenizer) -> bool:
    tool: dict[str, Any] = {"name": PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}}
    try:
        return PROBE in text.render(
            [{"role": "user", "content": "u"}], {"tools": [{"type": "function", "function": tool}]}
        )
    except InputError:
        return False


def _rendered_call(text: EngineTokenizer) -> str:
    """A conversation with a call, or nothing where the template refuses it."""
    call: dict[str, Any] = {
        "id": "call00001",
        "type": "function",
        "function": {"name": PROBE, "arguments": {PROBE: ""}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    try:
        return text.render(messages)
    except InputError:
        return ""


def _around(rendered: str) -> str:
    """Where the call is in what a template wrote."""
    at = rendered.find(PROBE)
    return rendered[max(0, at - 40) : at + 60]


def told(form: ToolFormat, tools: list[dict[str, Any]]) -> str:
    """What a model without tools in its template is told of them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = form.write("NAME", {"ARGUMENT": ".."})
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        f"To call one, answer with its name and its arguments in this form:\n{example}"
    )

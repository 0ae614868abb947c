"""What a chat template knows of tools, found by rendering it when an engine is built, and kept in its manifest."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ..text.channels import has_channels
from ..text.chat_template import ChatTemplate
from .formats import FORMATS, HARMONY, form_named
from .json_calls import EXAMPLE_ID
from .written import ToolFormat, shows

PROBE, SECOND = "specstep_probe", "specstep_second"  # a function and its first argument, and its second one
LISTED = {"<|tool_list_start|>": "lfm2", "List of tools: [": "lfm2"}  # ahead of tools -> how their models write calls
Json = dict[str, Any]


@dataclass(frozen=True)
class TemplateTools:
    """name: of FORMATS, how the model writes calls, empty where nobody knows. lists: whether the template shows the
    model which tools there are; keeps: whether it has a form for calls and results of earlier turns; channels: whether
    its answers are in channels. written: what it makes of a call, where the form is not known."""

    name: str
    lists: bool
    keeps: bool
    channels: bool
    written: str = ""

    def __post_init__(self) -> None:
        """Refuse a form that is not known, and one for channels where there are none, or the other way round. Raises
        InputError."""
        if self.name and (form_named(self.name) is HARMONY) != self.channels:
            raise InputError(
                f"tools: expected harmony for a chat template with channels, and for no other, got {self.name}; leave "
                "tool-format out, and the template says its form"
            )

    @property
    def form(self) -> ToolFormat:
        """How the model writes calls. Raises InputError where nobody knows."""
        if self.name:
            return FORMATS[self.name]
        raise InputError(
            f"tools: expected a chat template that writes calls as one of {', '.join(FORMATS)}, got {self.written!r}; "
            "tool-format says which one to take"
        )

    def over(self, name: str | None) -> "TemplateTools":
        """The same with the form that a user names, if one does. Raises InputError."""
        return self if name is None else dataclasses.replace(self, name=name, written="")

    def to_json(self) -> Json:
        """As the manifest has it."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "TemplateTools":
        """From there. Raises InputError."""
        return cls(**data)


def template_tools(template: ChatTemplate) -> TemplateTools:
    """Find it by rendering, with calls and with tools. A template that knows neither has Hermes' form; another
    form may be known by its marks."""
    rendered, lists = _rendered_call(template), _lists_tools(template)
    keeps, channels = PROBE in rendered, has_channels(template.source)
    forms = (each for each in FORMATS.items() if each[1] is not HARMONY)
    shown = next((name for name, form in forms if shows(form, rendered, PROBE, SECOND)), None)
    marked = next((name for mark, name in LISTED.items() if mark in template.source), None)
    name = "harmony" if channels else shown or marked or ("" if keeps or lists else "hermes")
    return TemplateTools(name, lists, keeps, channels, "" if name else _around(rendered))


def _tool(name: str) -> Json:
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def _lists_tools(template: ChatTemplate) -> bool:
    try:
        return PROBE in template.render([{"role": "user", "content": "u"}], {"tools": [_tool(PROBE)]})
    except InputError:
        return False


def _rendered_call(template: ChatTemplate) -> str:
    """A conversation with a call, or nothing where the template writes none: some do so beside tools alone, or where
    its result follows."""
    function = {"name": PROBE, "arguments": {PROBE: "", SECOND: ""}}
    asked: Json = {"role": "user", "content": "u"}
    call = {"id": EXAMPLE_ID, "type": "function", "function": function}
    called: Json = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Json = {"role": "tool", "tool_call_id": EXAMPLE_ID, "content": "r"}
    for messages in ([asked, called], [asked, called, result]):
        for arguments in ({}, {"tools": [_tool("other")]}):
            with contextlib.suppress(InputError):
                rendered = template.render(messages, arguments)
                if PROBE in rendered:
                    return rendered
    return ""


def _around(rendered: str) -> str:
    """Where the call is in what a template wrote."""
    at = rendered.find(PROBE)
    return rendered[max(0, at - 40) : at + 60]

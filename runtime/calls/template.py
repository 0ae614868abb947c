"""What a chat template knows of tools, found by rendering it when an engine is built, and kept in its manifest."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ..text.channels import has_channels
from ..text.chat_template import ChatTemplate
from .formats import FORMATS, HARMONY, form_named
from .written import ToolFormat, shows

PROBE = "specstep_probe"
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
    """Find it by rendering, with a call and with a tool. A template that knows no calls has Hermes' form."""
    rendered = _rendered_call(template)
    keeps, channels = PROBE in rendered, has_channels(template.source)
    found = (name for name, form in FORMATS.items() if form is not HARMONY and shows(form, rendered, PROBE))
    name = "harmony" if channels else next(found, "" if keeps else "hermes")
    return TemplateTools(name, _lists_tools(template), keeps, channels, "" if name else _around(rendered))


def _lists_tools(template: ChatTemplate) -> bool:
    function: Json = {"name": PROBE, "description": "d", "parameters": {"type": "object", "properties": {}}}
    try:
        asked = [{"role": "user", "content": "u"}]
        return PROBE in template.render(asked, {"tools": [{"type": "function", "function": function}]})
    except InputError:
        return False


def _rendered_call(template: ChatTemplate) -> str:
    """A conversation with a call, or nothing where the template refuses it."""
    call: Json = {"id": "call00001", "type": "function", "function": {"name": PROBE, "arguments": {PROBE: ""}}}
    try:
        return template.render(
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
    except InputError:
        return ""


def _around(rendered: str) -> str:
    """Where the call is in what a template wrote."""
    at = rendered.find(PROBE)
    return rendered[max(0, at - 40) : at + 60]

"""What a model says of conversations: its chat template, the special tokens in it, and how it is told of tools."""

from typing import Any

from ..errors import BuildError, InputError
from ..runtime.calls.template import TemplateTools, template_tools
from ..runtime.text.chat_template import ChatTemplate
from .source import Source


def chat_template(source: Source) -> str | None:
    """The model's chat template, None where it has none. Of several named ones that for tools where there are some,
    else the default, as transformers chooses. Raises BuildError."""
    found = source.tokenizer.chat_template
    templates = _named(found) if isinstance(found, list | dict) else {"default": "" if found is None else found}
    if templates is None or not all(isinstance(template, str) for template in templates.values()):
        raise BuildError(
            f"model: {source.name}: chat_template: expected text, or an object with name and template for each, "
            f"got {found!r:.60}"
        )
    default, with_tools = (templates.get(name) for name in ("default", "tool_use"))
    if default is None and with_tools is None:
        known = ", ".join(sorted(templates)) or "none"
        raise BuildError(
            f"model: {source.name}: chat_template: expected one template or one named default or tool_use, got {known}"
        )
    if default and with_tools:
        parts = [part.removesuffix("\n") for part in (with_tools, default)]  # as the end of a template
        return f"{{% if tools %}}{parts[0]}{{% else %}}{parts[1]}{{% endif %}}"
    return default or with_tools or None


def _named(found: list[Any] | dict[str, Any]) -> dict[str, Any] | None:
    """Template by name; a list of objects is what tokenizer_config.json holds. None for another list."""
    if isinstance(found, dict):
        return found
    entries = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
    return {entry["name"]: entry.get("template") for entry in entries} if len(entries) == len(found) else None


def special_tokens(source: Source) -> dict[str, str]:
    """Those that a template may name, such as bos_token."""
    special = source.tokenizer.special_tokens_map if source.tokenizer else {}
    return {name: token for name, token in special.items() if isinstance(token, str)}


def tools_of(source: Source, tool_format: str | None) -> TemplateTools | None:
    """What its chat template knows of tools, None for a model without one. tool_format: the form of calls, where the
    user names it. Raises BuildError."""
    template = chat_template(source) if source.tokenizer else None
    if template is None:
        if tool_format is not None:
            raise BuildError(
                f"tool_format: expected None for {source.name}, which has no chat template, got {tool_format}"
            )
        return None
    try:
        return template_tools(ChatTemplate(template, special_tokens(source))).over(tool_format)
    except InputError as error:
        raise BuildError(str(error)) from None

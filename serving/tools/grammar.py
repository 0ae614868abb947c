"""The grammar of an answer that may have calls: text, and calls in the model's form from their opening on."""

import json
import re
from collections.abc import Mapping
from typing import Any

from ...runtime.asked.lark import ANY, literal, schema_term, up_to
from ...runtime.calls.channel_calls import ChannelCalls
from ...runtime.calls.tool import Tools
from ...runtime.calls.written import ToolFormat
from ...runtime.text.reasoning import Reasoning
from ...runtime.text.tokenizer import EngineTokenizer

LEAD = "<|python_tag|>"  # what Llama 3 may write ahead of a call
BLANKS = r"\s\x1c-\x1f"  # what `str.strip` takes away, as a regular expression's class has it


def answer_grammar(
    tools: Tools,
    form: ToolFormat,
    reasoning: Reasoning | None,
    tokenizer: EngineTokenizer,
    document: str | None = None,
) -> str:
    """Lark of what comes after the reasoning, or of all of an answer in channels. document: the term for what text has
    to be, where the client asked for a form of it."""
    if isinstance(form, ChannelCalls):
        return "\n".join(form.answer_rules(tools, ANY if document is None else document, tokenizer))
    opening = literal(form.opening, tokenizer)
    if form.leads and LEAD in tokenizer.special_names:
        opening = f"({literal(LEAD, tokenizer)})? {opening}"
    calls, rules = f"{opening} calls", form.rules(tools.tools, tools.many, tokenizer)
    if tools.required:
        return "\n".join([f"start: {calls}", *rules])
    if document is not None:
        return "\n".join([f"start: text | {calls}", f"text: {document}", *rules])
    if form.leads:
        alike = f"~{form.leads}".replace("~", f"[{BLANKS}]*")
        return "\n".join([f"start: TEXT | {calls}", f"TEXT: {ANY} & ~/{alike}(?s:.*)/", *rules])
    text = ANY
    if reasoning is not None and not reasoning.opened and reasoning.begin not in tokenizer.special_names:
        mark = re.escape(reasoning.begin).replace("/", r"\/")
        text += f" & ~/{mark}(?s:.*)/"  # that is reasoning, which may speak of calls
    return "\n".join(
        ["start: TEXT | head calls", f"TEXT: {text}", up_to("head", form.opening, tokenizer, "TEXT"), *rules]
    )


def document_of(structured: Mapping[str, Any] | None) -> str | None:
    """The term for the document that a form of text asks for, which was checked; None for none. Raises KeyError for
    another form."""
    if structured is None:
        return None
    schema: Any = {"type": "object"} if "json_object" in structured else json.loads(structured["json"])
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return schema_term(schema, structured["lenient"], structured["disable_any_whitespace"])

"""All forms in which models write calls, by name."""

from ...errors import InputError
from .channel_calls import ChannelCalls
from .json_calls import JsonCalls
from .python_calls import PythonCalls
from .tagged_calls import TaggedCalls
from .written import ToolFormat

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
    "mistral-id": JsonCalls(
        opening="[TOOL_CALLS]", before="[TOOL_CALLS]", middle="[ARGS]", after="", marks_id="[CALL_ID]"
    ),
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
    "glm-4.7": TaggedCalls(
        opening="<tool_call>",
        before="<tool_call>",
        middle="",
        key="<arg_key>",
        value="</arg_key><arg_value>",
        value_end="</arg_value>",
        after="</tool_call>",
        between="",
    ),
    "phi-4": _listed("<|tool_call|>", "]<|/tool_call|>"),
    "nemotron": _listed("<TOOLCALL>", "]</TOOLCALL>"),
    "hermes": HERMES,
    "lfm2-json": _listed("<|tool_call_start|>", "]<|tool_call_end|>"),
    "lfm2": PythonCalls(opening="<|tool_call_start|>[", end="]<|tool_call_end|>"),
    "llama3": JsonCalls('{"name": "', '{"name": "', '", "parameters": ', "}", leads=r'\{~"name"~:', alone=True),
    "pythonic": PythonCalls(opening="[", end="]", leads=r"\[~[a-zA-Z_]"),
    "harmony": HARMONY,  # found by its channels
}


def form_named(name: str) -> ToolFormat:
    """The form that a user names. Raises InputError."""
    if name not in FORMATS:
        raise InputError(f"tool-format: expected one of {', '.join(FORMATS)}, got {name:.60}")
    return FORMATS[name]

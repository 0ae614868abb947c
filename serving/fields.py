"""The bodies of requests, as OpenAI's API and vLLM's extensions name their fields."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..controls import TOP_LOGPROBS
from ..runtime.asked.sampling_params import MOST_CHOICES, MOST_SEED, MOST_STOPS
from ..runtime.text.messages import ROLES
from .tools.custom import as_function_call
from .unsupported import without_idle

MOST_IDS = 16  # stop tokens of a row
MOST_PROMPTS = 128
MOST_MESSAGES = MOST_PARTS = 2**12  # of a conversation
MOST_VALUES, DEEPEST = 2**14, 48  # of data that the chat template is given
MOST_GRAMMAR = 2**16  # characters
MOST_FIELDS = 600  # of any object: a million wrong ones would be a million errors


def _not_too_many(fields: Any) -> Any:
    if isinstance(fields, dict) and len(fields) > MOST_FIELDS:
        raise ValueError(f"expected at most {MOST_FIELDS} fields, got {len(fields)}")
    return fields


def _bounded(data: Any) -> Any:
    """Data of any form, if it is small enough to be copied and rendered."""
    values, level = 0, [data]
    for _ in range(DEEPEST):
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        values += len(level)
        if values > MOST_VALUES:
            raise ValueError(f"expected at most {MOST_VALUES} values, got more")
    if level:
        raise ValueError(f"expected at most {DEEPEST} levels, got more")
    return data


def _items(data: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return data.values() if isinstance(data, dict) else data


def _not_too_many_parts(messages: Any) -> Any:
    """Counts them before any is looked at: each that is looked at takes time from other calls."""
    if isinstance(messages, list) and len(messages) <= MOST_MESSAGES:
        contents = (each.get("content") for each in messages if isinstance(each, dict))
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > MOST_PARTS:
            raise ValueError(f"expected at most {MOST_PARTS} parts in all messages, got {parts}")
    return messages


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=2**20, fail_fast=True)]  # a million wrong ones are one error
StopString = Annotated[str, Field(min_length=1, max_length=512)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR)]
Label = Annotated[str, Field(max_length=512)]
Biases = Annotated[dict[str, float], Field(max_length=512), BeforeValidator(_not_too_many)]
Data = Annotated[dict[str, Any], BeforeValidator(_bounded)]
DataList = Annotated[list[dict[str, Any]], BeforeValidator(_bounded)]
Metadata = Annotated[dict[str, str], Field(max_length=16), BeforeValidator(_not_too_many)]


class Fields(BaseModel):
    """An object with these fields alone, each of its own type: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    IDLE: ClassVar[dict[str, Any]] = {}  # fields that are not supported, and what asks for nothing in this kind alone

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, fields: Any) -> Any:
        return without_idle(_not_too_many(fields), cls.model_fields, cls.IDLE)


class StreamOptions(Fields):
    """include_usage: a last chunk with the usage; continuous_usage_stats: each chunk has that so far. include_drafts:
    each chunk tells its tokens, and how many of them were accepted drafts, in a field `specstep` of its own."""

    include_usage: bool | None = None
    include_drafts: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CommonFields(Fields):
    """What chat and completions have in common. What is left out, or null, is what the model recommends, or else what
    OpenAI's API takes: temperature 1."""

    model: str | None = Field(None, max_length=256, description="one of /v1/models; the first one when left out")
    stream: bool | None = Field(None, description="server-sent events")
    stream_options: StreamOptions | None = Field(None, description="what a stream tells besides")
    max_tokens: int | None = Field(None, ge=1, le=2**31, description="most tokens of an answer")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="choices of each prompt")
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS, fail_fast=True)] | None = Field(
        None, description="texts that end the answer and are left out"
    )
    seed: int | None = Field(None, ge=-MOST_SEED, le=MOST_SEED, description="same request and seed, same text")
    temperature: float | None = Field(None, ge=0, le=100, description="0, or from 0.01")
    top_p: float | None = Field(
        None, gt=0, le=1, description="keep the likeliest tokens that have this probability together"
    )
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: all tokens")
    min_p: float | None = Field(None, ge=0, le=1, description="least share of the likeliest token's probability")
    presence_penalty: Penalty | None = Field(None, description="subtracted once for a token of the output")
    frequency_penalty: Penalty | None = Field(None, description="subtracted for each time it is there")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="of tokens in prompt or output; 1: off")
    logit_bias: Biases | None = Field(None, description="token id -> added to its logit")
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="no stop before so many")
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_IDS, fail_fast=True)] | None = Field(
        None, description="tokens that end the answer"
    )
    ignore_eos: bool | None = Field(None, description="go on past the model's stop tokens")
    bad_words: Annotated[list[Word], Field(max_length=64, fail_fast=True)] | None = Field(
        None, description="texts that are never written"
    )
    response_format: Data | None = Field(None, description='{"type": "json_schema", ..}, json_object or text')
    structured_outputs: Data | None = Field(None, description="one of json, json_object, regex, choice, grammar")
    grammar: Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR)] | None = Field(
        None, description="GBNF or Lark"
    )
    json_schema: Data | None = Field(None, description="as in llama.cpp's server")
    learning: bool | None = Field(None, description="false: do not count the answer for the drafts of later ones")
    parse_special: bool | None = Field(None, description="true: names of special tokens in what is asked become tokens")
    user: Label | None = Field(None, description="taken, of no effect")
    safety_identifier: Label | None = Field(None, description="taken, of no effect")
    prompt_cache_key: Label | None = Field(None, description="taken, of no effect")
    prompt_cache_retention: Label | None = Field(None, description="taken, of no effect")
    metadata: Metadata | None = Field(None, description="taken, of no effect")


class TextPart(Fields):
    """A piece of a message; images, audio and files are not supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Fields):
    """One message. An assistant's of an earlier answer may be sent back as it came."""

    role: Literal[ROLES] = Field(description="who speaks")  # type: ignore[valid-type]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        None, description="text, or text parts; null beside tool_calls"
    )
    name: Label | None = Field(None, description="of the speaker")
    tool_calls: DataList | None = Field(None, description="calls of an earlier answer")
    tool_call_id: Label | None = Field(None, description="the call that a tool's message answers")
    reasoning_content: str | None = Field(None, description="reasoning of an earlier answer")
    refusal: None = None
    annotations: DataList | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("expected content, a text or a list of text parts, got none")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates see it: arguments of tools as objects, where they are sent as the text of one."""
        told = {name: getattr(self, name) for name in PLAIN if getattr(self, name) is not None}
        if isinstance(self.content, list):
            told["content"] = [{"type": "text", "text": part.text} for part in self.content]
        if self.tool_calls is not None:
            told["tool_calls"] = [_with_arguments(call) for call in self.tool_calls]
        return {"content": None, **told}


PLAIN = ("role", "content", "name", "tool_call_id", "reasoning_content")


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are data; that of a custom tool is a function's."""
    call = as_function_call(call)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = _bounded(json.loads(function["arguments"] or "{}"))
    except (ValueError, RecursionError):  # no JSON, or too much of it: a text, as it came
        return call
    return {**call, "function": {**function, "arguments": arguments}}


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_not_too_many_parts),
]


class Prediction(Fields):
    """What the answer will probably repeat. It changes nothing but the speed."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(CommonFields):
    """POST /v1/chat/completions."""

    IDLE = {"add_special_tokens": False}  # a chat template has them

    messages: Messages = Field(description="the conversation")
    prediction: Prediction | None = Field(None, description="what the answer will probably repeat")
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31, description="as max_tokens")
    logprobs: bool | None = Field(None, description="of each token")
    top_logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS, description="likely tokens beside each")
    chat_template_kwargs: Data | None = Field(None, description="variables of the chat template")
    tools: DataList | None = Field(None, description="functions and custom tools that the model may call")
    tool_choice: Literal["none", "auto", "required"] | Data | None = Field(
        None, description="or a named function or custom tool, or allowed_tools"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    reasoning_effort: Effort | None = Field(None, description="for templates that know it, or can leave out thoughts")

    @property
    def arguments(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs or {}


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    IDLE = {"add_special_tokens": True}

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    echo: bool | None = None


class TokenizeRequest(Fields):
    """POST /tokenize: a text, or messages and tools as a chat's."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    chat_template_kwargs: Data | None = None
    tools: DataList | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected prompt or messages, one of them")
        return self

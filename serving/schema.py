"""The OpenAPI schema: what answers look like. Requests are in `fields.py`."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from .guard import OPEN


class ErrorDetail(BaseModel):
    """What was wrong, and in which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that is an error."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those whose keys and values were kept from an earlier call."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Those of reasoning, of a model that thinks. Of a prediction's tokens, those that the answers have, and those that
    they have not."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Counted in tokens. completion_tokens_details: of models that think, and of calls with a prediction."""

    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(BaseModel):
    """A function's name, and the text of a JSON object of arguments."""

    name: str
    arguments: str


class CalledCustom(BaseModel):
    """A custom tool's name, and the text that it is given."""

    name: str
    input: str


class ToolCall(BaseModel):
    """A call that the model makes, of a function or a custom tool."""

    id: str
    type: str
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class AnswerMessage(BaseModel):
    """What the assistant said; content is null where it made calls alone. reasoning_content: of models that think."""

    role: str
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChatCompletion(BaseModel):
    """An answer that is not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str


class Completion(BaseModel):
    """Continuations that are not streamed."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Answered(BaseModel):
    """A response that is not streamed, in the part that clients read."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ListedModel(BaseModel):
    """A model that can be asked."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """All of them."""

    object: str
    data: list[ListedModel]


class TokenIds(BaseModel):
    """A prompt as the model reads it."""

    tokens: list[int]
    count: int
    max_model_len: int


Responses = dict[int | str, dict[str, Any]]


def _errors(**texts: str) -> Responses:
    return {int(status.removeprefix("e")): {"model": Error, "description": text} for status, text in texts.items()}


BASE = _errors(e401="No valid API key", e408="The body is late", e413="The body is too large")
EVENT = {"data": {"type": "string", "description": "JSON: what choices grew by, or an error; the last is [DONE]"}}
STREAM = {"text/event-stream": {"schema": {"type": "object", "required": ["data"], "properties": EVENT}}}
ANSWERS = BASE | _errors(
    e400="A field that cannot be taken; its name is `param`",
    e404="No such model",
    e429="The queue is full; Retry-After says when to come back",
    e500="The server failed",
    e503="The server shuts down",
)
CHAT: Responses = {200: {"model": ChatCompletion, "description": "The answer", "content": STREAM}}
COMPLETION: Responses = {200: {"model": Completion, "description": "The continuations", "content": STREAM}}
RESPONSE: Responses = {200: {"model": Answered, "description": "The answer", "content": STREAM}}
MODELS: Responses = BASE | {200: {"model": Models}}
MODEL: Responses = MODELS | {200: {"model": ListedModel}} | _errors(e404="No such model")
BATCH = {"data": {"type": "string", "description": "JSON: a batch of vLLM's, {ts, events}"}, "id": {"type": "string"}}
BATCHES = {"text/event-stream": {"schema": {"type": "object", "required": ["data"], "properties": BATCH}}}
KV_EVENTS: Responses = (
    BASE | {200: {"description": "Events without an end", "content": BATCHES}} | _errors(e404="No such model")
)
TOKENS: Responses = ANSWERS | {200: {"model": TokenIds}}


def openapi(app: FastAPI, keys: bool) -> dict[str, Any]:
    """The schema, made once: errors have OpenAI's form and not FastAPI's. keys: whether a call needs one."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, methods in schema["paths"].items():
            for method in methods.values():
                method["responses"].pop("422", None)
                if keys and path not in OPEN:
                    method["security"] = [{"key": []}]
        parts = schema["components"]
        for name in ("HTTPValidationError", "ValidationError"):
            parts["schemas"].pop(name, None)
        if keys:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema

"""The routes: OpenAI's API over engines, and what operators and people look at."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse

from ..errors import InputError
from ..runtime.calls.formats import HERMES
from ..runtime.engine import Engine
from ..runtime.kv_events import KVEvents
from .answering import ChunkStream, ServedCall, listed, whole
from .api_error import ApiError
from .bridge import Answer
from .errors import add_handlers
from .fields import ChatRequest, CommonFields, CompletionRequest, TokenizeRequest
from .forms import AnswerForm, ChatForm, CompletionForm
from .guard import Guard
from .kv_stream import KVEventStream
from .metrics import Metrics
from .options import ServeOptions
from .places import on_error
from .prepare import choices, knows_effort, prepare_chat, prepare_completion, tokens_of
from .responses.answer import PREFIX, ResponseStream, StatelessResponse
from .responses.fields import ResponsesRequest, names_as_sent
from .responses.output import Output
from .schema import ANSWERS, CHAT, COMPLETION, KV_EVENTS, MODEL, MODELS, RESPONSE, TOKENS, openapi
from .served import Served
from .tools.conversation import Reading

logger = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; " \
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # fmt: skip


def create_app(engines: Mapping[str, Engine], options: ServeOptions | None = None) -> FastAPI:
    """The whole server as an ASGI application. It closes no engine.

    Args:
        engines: by the names that clients know them by, at least one; the first is the one of requests without a name.
        options: None for an open API with the default limits.
    """
    options = options or ServeOptions()
    served = {
        name: Served(name, engine, options.max_queue, options.learning, options.tool_format)
        for name, engine in engines.items()
    }
    metrics = Metrics(served.values())
    app = FastAPI(
        title="specstep", description="OpenAI's API over compiled speculative decoding.", version="1", redoc_url=None
    )
    app.openapi = lambda: openapi(app, bool(options.api_keys))  # type: ignore[method-assign]

    def check() -> None:
        """For whoever runs the application. Raises EngineError where an engine is broken or closed."""
        for one in served.values():
            one.check()

    app.state.check = check
    add_handlers(app)
    _add_answers(app, served, metrics, options)
    _add_responses(app, served, metrics, options)
    _add_models(app, served)
    _add_health(app, served)
    _add_looks(app, metrics)
    if options.kv_events:
        _add_kv_events(app, {name: _events(one) for name, one in served.items()}, served)
    routes = [path for route in app.routes if "{" not in (path := getattr(route, "path", ""))]
    app.add_middleware(Guard, options=options, metrics=metrics, routes=routes)
    return app


def _add_answers(app: FastAPI, served: Mapping[str, Served], metrics: Metrics, options: ServeOptions) -> None:
    """The two routes that generate."""

    @app.post("/v1/chat/completions", responses=ANSWERS | CHAT, response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        one = _find(served, body.model)
        _log_prompt(options, one, body.messages)
        places = one.take(choices(body))
        with on_error(places):
            ready = await asyncio.to_thread(prepare_chat, one, body, request.state.prefix_scope)
            form = ChatForm(one.token_text, bool(body.logprobs), ready.reading)
            answer = Answer(one.engine, ready.requests, places.give_back, one.shown_text if ready.reading else None)
        interval = options.stream_interval_ms / 1e3
        call = ServedCall(one, answer, places, form.prefix, metrics, ready.firsts, interval, reading=ready.reading)
        return await _answered(body, call, form, request)

    @app.post("/v1/completions", responses=ANSWERS | COMPLETION, response_model=None)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Go on with a text, or with token ids."""
        one = _find(served, body.model)
        _log_prompt(options, one, body.prompt)
        places = one.take(choices(body))
        with on_error(places):
            ready = await asyncio.to_thread(prepare_completion, one, body, request.state.prefix_scope)
            form = CompletionForm(one.token_text, body.logprobs, ready.echoed)
            answer = Answer(one.engine, ready.requests, places.give_back)
        call = ServedCall(one, answer, places, form.prefix, metrics, ready.firsts, options.stream_interval_ms / 1e3)
        return await _answered(body, call, form, request)


def _add_responses(app: FastAPI, served: Mapping[str, Served], metrics: Metrics, options: ServeOptions) -> None:
    """The newer route that generates."""

    @app.post("/v1/responses", responses=ANSWERS | RESPONSE, response_model=None)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation."""
        one = _find(served, body.model)
        _log_prompt(options, one, body.input)
        with names_as_sent():
            chat = body.chat()
            if not knows_effort(one):  # clients send it to any model
                chat.reasoning_effort = None
            places = one.take(choices(chat))
            with on_error(places):
                ready = await asyncio.to_thread(prepare_chat, one, chat, request.state.prefix_scope)
                answer = Answer(one.engine, ready.requests, places.give_back, one.shown_text if ready.reading else None)
        interval = options.stream_interval_ms / 1e3
        call = ServedCall(one, answer, places, PREFIX, metrics, ready.firsts, interval, reading=ready.reading)
        output = Output((ready.reading or Reading(None, None, HERMES)).reader())
        told = StatelessResponse(call, body, output)
        return ResponseStream(told) if body.stream else await whole(call, request.receive, told.whole)


def _add_models(app: FastAPI, served: Mapping[str, Served]) -> None:
    """What there is to ask, and how its tokens are counted."""

    @app.get("/v1/models", responses=MODELS, response_model=None)
    async def list_models() -> dict[str, Any]:
        """The models of this server."""
        return {"object": "list", "data": [_model(one) for one in served.values()]}

    @app.get("/v1/models/{model:path}", responses=MODEL, response_model=None)
    async def retrieve_model(model: str) -> dict[str, Any]:
        """One of them."""
        return _model(_find(served, model))

    @app.post("/tokenize", responses=TOKENS, response_model=None)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text, or of a conversation in the chat template."""
        one = _find(served, body.model)
        tokens = await asyncio.to_thread(tokens_of, one, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": one.engine.spec.max_seq_len}


def _add_health(app: FastAPI, served: Mapping[str, Served]) -> None:
    """What whoever starts servers asks, and whoever sends calls to them."""

    @app.get("/health", response_class=PlainTextResponse)
    @app.get("/readyz", response_class=PlainTextResponse)
    async def ready() -> str:
        """Whether the server answers, and all of its engines run: calls may be sent."""
        app.state.check()
        return "ok"

    @app.get("/livez", response_class=PlainTextResponse)
    async def live() -> str:
        """Whether the server answers, and no engine has failed for good: otherwise, start it again."""
        for one in served.values():
            one.check_alive()
        return "ok"


def _add_looks(app: FastAPI, metrics: Metrics) -> None:
    """What operators and people look at."""

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Counters, gauges and histograms for Prometheus."""
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        """A page to chat with the models."""
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)


def _add_kv_events(app: FastAPI, events: Mapping[str, KVEvents], served: Mapping[str, Served]) -> None:
    """What routers read that send a prompt to where its beginning is."""

    @app.get("/kv_events", responses=KV_EVENTS, response_model=None)
    async def read_kv_events(
        model: str | None = None, last_event_id: Annotated[str | None, Header()] = None
    ) -> KVEventStream:
        """Which blocks of tokens a model's prefix cache keeps, and each that comes and goes, as server-sent events."""
        one = _find(served, model)
        return KVEventStream(one, events[one.name], last_event_id)


def _events(one: Served) -> KVEvents:
    """Those of an engine's prefix cache. Raises InputError where it tells none."""
    if one.engine.kv_events is None:
        raise InputError(f"kv-events: expected engines that were loaded with kv_events=True, got {one.name} without")
    return one.engine.kv_events


async def _answered(body: CommonFields, call: ServedCall, form: AnswerForm, request: Request) -> Response:
    """Streamed or whole, as the body asks."""
    if not body.stream:
        return await whole(call, request.receive, lambda texts: listed(call, form, texts))
    if body.stream_options:
        call.include_usage = bool(body.stream_options.include_usage)
        call.usage_so_far = bool(body.stream_options.continuous_usage_stats)
        call.include_drafts = bool(body.stream_options.include_drafts)
    return ChunkStream(call, form)


def _find(served: Mapping[str, Served], name: str | None) -> Served:
    """The model of a name, the first without one. Raises ApiError."""
    if name is None:
        return next(iter(served.values()))
    if name not in served:
        message = f"model: expected one of {', '.join(served)}, got {name!r:.60}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return served[name]


def _model(one: Served) -> dict[str, Any]:
    return {
        "id": one.name,
        "object": "model",
        "created": one.created,
        "owned_by": "specstep",
        "max_model_len": one.engine.spec.max_seq_len,
    }


def _log_prompt(options: ServeOptions, one: Served, prompt: Any) -> None:
    if options.log_prompts:
        logger.info("%s: %r", one.name, prompt)

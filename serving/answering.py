"""An answer under way, as one JSON object or as a stream of server-sent events."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from ..runtime.asked.request import Request
from ..runtime.text.reasoning import reasoning_tokens
from .api_error import BROKEN, error_body
from .bridge import Answer, Grown
from .drafts import Drafts
from .errors import closing
from .forms import AnswerForm, Json
from .metrics import Metrics
from .places import Places
from .served import Served
from .tools.conversation import Reading

logger = logging.getLogger(__name__)
GONE = 499  # the client closed the connection, as nginx counts it
LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass
class ServedCall:
    """One call: its answer, and what is to be done when it ends."""

    served: Served  # model and queue
    answer: Answer  # the requests, read from coroutines
    places: Places  # in the queue, given back at the end
    prefix: str  # of its id
    metrics: Metrics  # counts its end
    firsts: list[Request]  # of the choices, one of each prompt
    interval: float = 0.0  # least seconds from one chunk of a stream to the next, unless a choice ends
    include_usage: bool = False  # a last chunk has token counts
    usage_so_far: bool = False  # each other one, too
    include_drafts: bool = False  # each chunk says what was drafted
    reading: Reading | None = None  # how its answers are read, which may have reasoning
    started: float = field(default_factory=time.perf_counter)  # when the call came, seconds of perf_counter
    created: int = field(default_factory=lambda: int(time.time()))  # the same as Unix time
    gone: bool = False  # the client

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    @contextlib.contextmanager
    def running(self, receive: Receive) -> Iterator[None]:
        """Watches for the client to go away; whatever happens in the block, the rows are free when it is left."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            yield
        finally:
            watch.cancel()
            self.answer.cancel()
            self.places.give_back()
            self._ended()

    def _ended(self) -> None:
        """Count it, and tell the log how much it was."""
        seconds, requests = time.perf_counter() - self.started, self.answer.requests
        self.served.took(seconds)
        for request in requests:
            self.metrics.ended(self.served.name, request)
        new, reasons = sum(len(request.tokens) for request in requests), {request.finish_reason for request in requests}
        told = (
            self.id,
            self.served.name,
            sum(len(request.prompt) for request in self.firsts),
            new,
            ", ".join(sorted(map(str, reasons))),
            seconds,
        )
        logger.info("%s %s: %d prompt tokens, %d new, %s, %.3f s", *told)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.answer.cancel()

    def head(self, kind: str) -> Json:
        """What every object of this call begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}

    def usage(self) -> Json:
        """Tokens of prompt and answers, of reasoning, and of a `prediction` that the client sent."""
        prompt = sum(len(request.prompt) for request in self.firsts)
        completion = sum(len(request.tokens) for request in self.answer.requests)
        cached = sum(request.cached_tokens for request in self.firsts)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        told: Json = {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
        details = self._reasoning_tokens()
        for request in self.answer.requests:
            for key, count in request.prediction_counts.items():
                details[key] = details.get(key, 0) + count
        return {**told, "completion_tokens_details": details} if details else told

    def _reasoning_tokens(self) -> dict[str, int]:
        """Tokens of reasoning in all choices, nothing for a model that has none."""
        thinks = self.reading and self.reading.thinks
        if not thinks:
            return {}
        text = self.served.tokenizer
        answers = (request.tokens for request in self.answer.requests)
        return {"reasoning_tokens": sum(reasoning_tokens(text, thinks, answer) for answer in answers)}


async def whole(call: ServedCall, receive: Receive, body: Callable[[list[str]], Json]) -> Response:
    """The answer as one object. body: makes it of the choices' texts."""
    texts = [""] * len(call.answer.requests)
    with call.running(receive):
        async for grown in call.answer.read(call.interval):
            for each in grown:
                texts[each.choice] += each.text
        if call.gone:
            return Response(status_code=GONE)
        if any(request.finish_reason == "cancelled" for request in call.answer.requests):
            return closing().response()
        return Response(dumped(body(texts)), media_type="application/json")


def listed(call: ServedCall, form: AnswerForm, texts: Sequence[str]) -> Json:
    """The object of a chat or of completions, with its choices."""
    choices = [
        form.whole(index, text, request.logprobs, request.finish_reason or "")
        for index, (text, request) in enumerate(zip(texts, call.answer.requests, strict=True))
    ]
    return {**call.head(form.whole_object), "choices": choices, "usage": call.usage()}


class EventStream(Response):
    """An answer as server-sent events, in a form that a subclass gives them."""

    def __init__(self, call: ServedCall):
        self.call = call
        super().__init__(None, 200, HEADERS, "text/event-stream")

    def begin(self) -> Iterator[bytes]:
        """What comes before the first token."""
        raise NotImplementedError

    def grow(self, grown: Grown) -> Iterator[bytes]:
        """What a choice grew by."""
        raise NotImplementedError

    def end(self) -> Iterator[bytes]:
        """What comes after the last token."""
        raise NotImplementedError

    def fail(self, error: Json) -> bytes:
        """An error after which nothing comes, in OpenAI's form."""
        return event(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        with self.call.running(receive):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                async for event in self._events():
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except asyncio.CancelledError:  # at the end of the server
                await send({"type": "http.response.body", "body": self.fail(closing().body), "more_body": False})
                raise
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        call = self.call
        try:
            if begun := b"".join(self.begin()):
                yield begun
            async for grown in call.answer.read(call.interval):
                if chunks := b"".join(chunk for each in grown for chunk in self.grow(each)):
                    yield chunks
        except Exception:
            logger.exception("%s failed", call.id)
            yield self.fail(error_body("the server failed; its log says why", BROKEN))
            return
        if call.gone:
            return
        if any(request.finish_reason == "cancelled" for request in call.answer.requests):
            yield self.fail(closing().body)
            return
        yield b"".join(self.end())


class ChunkStream(EventStream):
    """Chunks of what each choice grew by, then `[DONE]`."""

    def __init__(self, call: ServedCall, form: AnswerForm):
        self._form, tokenizer = form, call.served.engine.text
        asked = call.include_drafts and tokenizer is not None
        self._drafts = [Drafts(tokenizer) for _ in call.answer.requests] if asked and tokenizer else []
        super().__init__(call)

    def begin(self) -> Iterator[bytes]:
        """See `EventStream`."""
        for index in range(len(self.call.answer.requests)):
            begun = self._form.begin(index)
            if begun is not None:
                yield self._chunk(begun)

    def grow(self, grown: Grown) -> Iterator[bytes]:
        """See `EventStream`."""
        text, logprobs, reason = grown.text, grown.logprobs, grown.request.finish_reason
        drafts = self._drafts[grown.choice].told(grown) if self._drafts else None
        if text or logprobs or drafts:
            choice = self._form.grown(grown.choice, text, logprobs)
            if choice is not None or drafts:
                yield self._chunk(choice, drafts)
        if reason in ("stop", "length"):
            yield self._chunk(self._form.end(grown.choice, reason))

    def end(self) -> Iterator[bytes]:
        """See `EventStream`."""
        if self.call.include_usage:
            yield event({**self.call.head(self._form.chunk_object), "choices": [], "usage": self.call.usage()})
        yield b"data: [DONE]\n\n"

    def _chunk(self, choice: Json | None, drafts: Json | None = None) -> bytes:
        chunk = {**self.call.head(self._form.chunk_object), "choices": [] if choice is None else [choice]}
        if self.call.include_usage:
            chunk["usage"] = self.call.usage() if self.call.usage_so_far else None
        if drafts is not None:
            chunk["specstep"] = drafts
        return event(chunk)


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event, with a name where it has one."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + dumped(data) + b"\n\n"


def dumped(data: Any) -> bytes:
    """JSON without a character at which any client, such as one that uses Python's `splitlines`, may end a line."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.translate(LINE_ENDS).encode()

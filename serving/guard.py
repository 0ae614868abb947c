"""What stands ahead of the routes: the log and the count of calls, API keys, and the size of bodies."""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_error import BUSY, ApiError
from .metrics import Metrics
from .options import ServeOptions

logger = logging.getLogger(__name__)
HEALTH = ("/health", "/livez", "/readyz")
OPEN = frozenset({"/", *HEALTH, "/docs", "/docs/oauth2-redirect", "/openapi.json"})  # without a key
SCOPE = "prefix_scope"  # in the state of a call: the same for all calls with one key
SALT = secrets.token_bytes(16)  # a scope tells nothing of its key
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Guard:
    """Lets through what has a key and a body that is not too large, and counts it all."""

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, routes: Sequence[str]):
        """routes: the paths that are told by name; all others are one."""
        self._app, self._options, self._metrics, self._routes = app, options, metrics, frozenset(routes)
        self._held = 0  # bytes of the bodies under way
        self._keys = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._let_through(scope, receive, counted)
        finally:
            seconds = time.perf_counter() - started
            route = self._route(scope["path"])
            self._metrics.called(route, status, seconds)
            method = scope["method"] if scope["method"] in METHODS else "OTHER"
            logger.info("%s %s %d %.3f s", method, route, status, seconds)

    def _route(self, path: str) -> str:
        if path in self._routes:
            return path
        return "/v1/models/{model}" if path.startswith("/v1/models/") else "other"

    async def _let_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_host(scope)
            scope.setdefault("state", {})[SCOPE] = self._checked_key(scope)
            with self._holding() as hold:
                await self._app(scope, await self._with_body(scope, receive, hold), send)
        except ApiError as error:
            await error.response()(scope, receive, send)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[Callable[[int], None]]:
        """A function that counts bytes of a body until the block is left. It raises ApiError where all bodies have as
        many as they may."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            mine += size
            self._held += size
            if self._held > self._options.most_held:
                raise ApiError(503, "the server holds as many request bodies as it may; try again later", BUSY)

        try:
            yield hold
        finally:
            self._held -= mine

    def _check_host(self, scope: Scope) -> None:
        """Raises ApiError for a name that this server does not go by."""
        name = re.sub(r":\d*$", "", _header(scope, b"host")).lower()
        if self._options.hosts and name not in self._options.hosts:
            raise ApiError(
                403, "Host: expected localhost, 127.0.0.1 or [::1]; start the server with --api-key to take other names"
            )

    def _checked_key(self, scope: Scope) -> str:
        """The scope of the call's key. Raises ApiError. Each key is compared, whether or not one was found before."""
        if not self._keys:
            return ""
        given = _digest(_bearer(scope))
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if any(matches):
            return "" if self._options.share_prefixes else hmac.new(SALT, given, "sha256").hexdigest()
        if scope["path"] in OPEN:
            return ""
        raise ApiError(
            401,
            "expected an API key of this server in the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    async def _with_body(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> Receive:
        """Read the body -> a `receive` that gives it, and then what comes after it. Raises ApiError."""
        most, length = self._options.most_bytes, _header(scope, b"content-length")
        if length.isdigit() and (len(length) > 15 or int(length) > most):
            raise _too_large(most)
        parts, size, more = [], 0, True
        try:
            async with asyncio.timeout(self._options.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > most:
                        raise _too_large(most)
                    hold(len(parts[-1]))
        except TimeoutError:
            raise ApiError(408, f"body: expected all of it in {self._options.body_seconds:.0f} s") from None
        first: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replayed() -> Message:
            return first.pop() if first else await receive()

        return replayed


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"body: expected at most {most} bytes", code="request_too_large")


def _digest(key: str) -> bytes:
    """Of one length for all keys, so that a comparison takes as long for each."""
    return hashlib.sha256(key.encode()).digest()


def _bearer(scope: Scope) -> str:
    kind, _, key = _header(scope, b"authorization").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")

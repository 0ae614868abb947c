"""A socket, uvicorn on it, and an end that lets answers finish."""

import asyncio
import ipaddress
import signal
import socket
import sys
from collections.abc import Mapping
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import InputError
from ..runtime.engine import Engine
from .app import create_app
from .connection import limited
from .errors import closing
from .options import ServeOptions

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


# Seconds for which a connection may rest: longer than clients' libraries keep one (5 s, as a rule). Where the server
# closes first, its close may cross a request, which is lost then.
KEEP_ALIVE = 30
LAST_WORDS = 1.0  # seconds for the answers that are ended at shutdown


class _Server(uvicorn.Server):
    """Says when it is there; ends when an engine is broken, and at once at a second signal."""

    def __init__(self, config: uvicorn.Config, said: str, engines: Mapping[str, Engine]):
        super().__init__(config)
        self.fault: str | None = None
        self._said, self._engines = said, engines
        self._signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        print(self._said, file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        for name, engine in self._engines.items():
            if self.fault is None and (error := engine.broken) is not None:
                self.fault = f"engine: {name}: expected one that runs, got {type(error).__name__}: {error}; start again"
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that do not end in time are ended, and say so."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=LAST_WORDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again, self._signalled = self._signalled, True
        super().handle_exit(sig, frame)
        if again:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        """End all answers, and then all connections."""
        for task in self.server_state.tasks:
            task.cancel()
        for connection in self.server_state.connections:
            self._loop.call_later(LAST_WORDS / 2, connection.transport.abort)


class _Ending:
    """An application whose calls, where the server cancels them, are answered: uvicorn has a text for them."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        except asyncio.CancelledError:
            if not begun:
                await closing().response()(scope, receive, send)


def configured(app: ASGIApp, options: ServeOptions, drain_seconds: int | None = None) -> uvicorn.Config:
    """How an application is served."""
    return uvicorn.Config(
        _Ending(app),
        http=limited(options),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=drain_seconds,
        lifespan="off",
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes any that is free. Raises InputError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as error:
        got = getattr(error, "strerror", None) or error
        raise InputError(f"host, port: expected an address that is free, got {host} {port}: {got}") from None
    return bound


def hosts_of(host: str, keys: bool) -> tuple[str, ...]:
    """The names that a server goes by: any, but where it is open and for this machine alone."""
    return () if keys or not is_local(host) else (*LOCAL_HOSTS, host.lower())


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def serve(engines: Mapping[str, Engine], bound: socket.socket, options: ServeOptions, drain_seconds: int) -> str | None:
    """Serve until SIGINT or SIGTERM, or until an engine breaks; answers under way then have `drain_seconds` to end, and
    a second signal ends them at once. Closes no engine. Called from the main thread.

    Returns:
        None after a signal; which engine broke, and why, otherwise.
    """
    host, port = bound.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    said = f"specstep: serving {', '.join(engines)} at {address}"
    server = _Server(configured(create_app(engines, options), options, drain_seconds), said, engines)
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:  # uvicorn sends itself the signals that it caught, to the handlers that it found
        server.run(sockets=[bound])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return server.fault

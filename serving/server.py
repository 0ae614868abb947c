"""A socket, uvicorn on it, and an end that lets answers finish."""

import signal
import socket
import sys
from collections.abc import Mapping

import uvicorn

from ..errors import InputError
from ..runtime.engine import Engine
from .app import create_app
from .options import ServeOptions

LOOPBACK = ("localhost", "127.", "::1")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class _Server(uvicorn.Server):
    """Says when it is there."""

    said = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.said, file=sys.stderr, flush=True)


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
    return host.startswith(LOOPBACK)


def serve(engines: Mapping[str, Engine], bound: socket.socket, options: ServeOptions, drain_seconds: int) -> None:
    """Serve until SIGINT or SIGTERM; answers under way then have `drain_seconds` to end, and a second signal ends them
    at once. Closes no engine. Called from the main thread."""
    config = uvicorn.Config(
        create_app(engines, options),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
        lifespan="off",
    )
    server = _Server(config)
    host, port = bound.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server.said = f"specstep: serving {', '.join(engines)} at {address}"
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:  # uvicorn sends itself the signals that it caught, to the handlers that it found
        server.run(sockets=[bound])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

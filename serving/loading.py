"""What a server answers before its engines are there: that it is alive, and not ready."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

from fastapi.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from .api_error import BROKEN, ApiError
from .options import ServeOptions
from .server import configured

PATIENCE = 5  # seconds after which a client may ask again


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application that has no models yet."""
    headers = {"Connection": "close"}  # the next call is for the server that comes
    if scope["path"] == "/livez":
        await PlainTextResponse("ok", headers=headers)(scope, receive, send)
    else:
        headers["Retry-After"] = str(PATIENCE)
        error = ApiError(503, "the models are being loaded; try again later", BROKEN, headers=headers)
        await error.response()(scope, receive, send)


async def _answer(bound: socket.socket, options: ServeOptions, ended: asyncio.Event) -> None:
    """Answer on a socket until the event is set. Without uvicorn's server: it says that it ends, and takes its time."""
    config, state = configured(_loading, options), ServerState()
    config.load()

    def connection() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    server = await asyncio.get_running_loop().create_server(connection, sock=bound, backlog=config.backlog)
    await ended.wait()
    server.close()


@contextlib.contextmanager
def alive(bound: socket.socket, options: ServeOptions) -> Iterator[None]:
    """While the block runs, answer on a bound socket that the server is alive and not ready. Who connects afterwards
    waits for the server that takes the socket over."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner, bound.dup() as own:
            runner.run(_answer(own, options, ended))

    thread = threading.Thread(target=run, name="specstep loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it could not answer, and said why
            loop.call_soon_threadsafe(ended.set)
        thread.join()

"""What the process of an engine runs: it answers what a model in Triton asks, batched in flight."""

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from ...errors import EngineError, InputError
from ...runtime.engine import Engine
from ...runtime.load import load
from ..bridge import Answer
from ..places import QueueFullError, TooManyError, on_error
from ..served import Served
from .engine_process import End, FromWorker, ToWorker
from .tensors import Given, read, told

LOOK = 0.2  # seconds between looks at whether the engine runs
logger = logging.getLogger(__name__)


class Worker:
    """The requests of one connection. Everything happens in the thread of one event loop."""

    def __init__(self, served: Served, tell: Callable[[FromWorker], None]):
        self._served, self._tell = served, tell
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, asked: ToWorker) -> None:
        """Begin a request, or end one."""
        number, given = asked
        if given is not None:
            self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, given))
            self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, given: Given) -> None:
        try:
            await self._run(number, given)
        except Exception as error:
            self._tell((number, self._end(error)))
        else:
            self._tell((number, End()))

    async def _run(self, number: int, given: Given) -> None:
        queue = self._served.queue
        place = queue.take(1)  # ahead of the work of reading it: bodies that are read are counted, too
        try:
            requests, form, text = await asyncio.to_thread(read, self._served, given)
        finally:
            place.give_back()
        places = queue.take(len(requests))
        with on_error(places):
            answer = Answer(self._served.engine, requests, places.give_back, text)
        try:
            async for grown in answer.read():
                for each in grown:
                    self._tell((number, told(each, form)))
        finally:
            answer.cancel()
            places.give_back()

    def _end(self, error: Exception) -> End:
        if isinstance(error, QueueFullError):
            return End("UNAVAILABLE", str(error))
        if isinstance(error, InputError | TooManyError):
            return End("INVALID_ARG", str(error))
        if isinstance(error, EngineError):
            return End("UNAVAILABLE", "the model is not available")
        logger.error("a request failed", exc_info=error)
        return End("INTERNAL", "the model failed; its log says why")


async def serve(connection: Connection, make: Callable[[], Served]) -> str | None:
    """Answer what comes over a connection until its other end is closed, or the engine breaks.

    Args:
        make: loads the engine. Requests that come before it is done wait for it.

    Returns:
        None, or why the engine answers no more: the process is to end then, and another one takes its place.
    """
    asked: asyncio.Queue[ToWorker | None] = asyncio.Queue()
    arguments = (connection, asked, asyncio.get_running_loop())
    threading.Thread(target=_read, args=arguments, name="specstep-triton", daemon=True).start()
    try:
        served = await asyncio.to_thread(make)
    except (EngineError, InputError) as error:
        connection.send(str(error))
        return str(error)
    connection.send(None)

    def tell(message: FromWorker) -> None:
        with contextlib.suppress(OSError):  # nobody is there any more; `_read` sees it too
            connection.send(message)

    with served.engine as engine:
        worker = Worker(served, tell)
        watch = asyncio.create_task(_watch(engine, asked))
        while (message := await asked.get()) is not None:
            worker.take(message)
        watch.cancel()
        broken = engine.broken
    return None if broken is None else f"engine: expected one that runs, got {type(broken).__name__}: {broken}"


async def _watch(engine: Engine, asked: "asyncio.Queue[ToWorker | None]") -> None:
    """End what is asked when the engine breaks."""
    while engine.broken is None:
        await asyncio.sleep(LOOK)
    asked.put_nowait(None)


def _read(connection: Connection, asked: "asyncio.Queue[ToWorker | None]", loop: asyncio.AbstractEventLoop) -> None:
    """Hand on what comes, None at the end. A thread of its own, so that whoever sends never waits for the engine."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: the engine could not be loaded
        try:
            while True:
                loop.call_soon_threadsafe(asked.put_nowait, connection.recv())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(asked.put_nowait, None)


def main(engine: str, max_queue: str, tool_format: str, place: str) -> str | None:
    """tool_format: empty for the engine's. place: of the socket that is the connection's other end."""

    def make() -> Served:
        return Served("engine", load(Path(engine)), int(max_queue), learning=True, tool_format=tool_format or None)

    return asyncio.run(serve(Connection(int(place)), make))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # why, to the server's log

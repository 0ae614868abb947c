"""Servers for tests: an application on a socket of its own, and what tests ask of it."""

import contextlib
import threading
import time

import httpx2 as httpx
import uvicorn
from specstep.errors import EngineError
from specstep.serving.options import ServeOptions
from specstep.serving.server import configured, listen

PATIENCE = 60  # seconds after which a wait is taken for a hang


@contextlib.contextmanager
def running(app, options=None):
    """Serve an application in a thread -> its address. options: those of the application."""
    server = uvicorn.Server(configured(app, options or ServeOptions()))
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        bound.close()
        assert not thread.is_alive(), "the server hangs"


def until(true):
    """Wait for something to be true."""
    ends = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.002)


def is_idle(engine):
    """Whether all rows are free and the worker is gone, or the engine is closed."""
    try:
        return engine._scheduler._worker is None and engine.session.free_rows == engine.spec.max_batch
    except EngineError:
        return True


def post(url, path, **body):
    """One call without a client's retries."""
    return httpx.post(url + path, json=body, timeout=PATIENCE)


def user(text):
    return [{"role": "user", "content": text}]


def joined(stream):
    """A streamed message, as clients put it together."""
    content, calls, reason = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            assert reason is None, "nothing comes after the end"
            content += choice.delta.content or ""
            for each in choice.delta.tool_calls or []:
                if each.index == len(calls):
                    assert each.id and each.type == "function" and each.function.name
                    calls.append([each.function.name, ""])
                else:
                    assert each.id is None and each.function.name is None
                calls[each.index][1] += each.function.arguments
            reason = choice.finish_reason
    return content or None, [tuple(call) for call in calls], reason

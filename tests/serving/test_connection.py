"""Connections that send too much, too slowly, or never end: the server answers, lets go, and its memory stays level."""

import asyncio
import inspect
import json
import os
import re
import select
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from served import PATIENCE, running, until
from specstep.serving.connection import LONGEST_HEAD, MOST_PIPELINED, Connection
from specstep.serving.options import ServeOptions
from specstep.serving.server import configured

ENDED = []  # paths of calls that were told
LINE = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    """Takes any call, and reads no body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(scope="module")
def url():
    with running(app) as url:
        yield url


@pytest.fixture(scope="module")
def hasty():
    """One that waits for nobody, and has few connections."""
    with running(app, ServeOptions(head_seconds=0.2, send_seconds=0.2, max_connections=4)) as url:
        yield url


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def answer(client, *parts):
    """What a client gets that sends these, up to the end of the connection."""
    told = b""
    try:
        for part in parts:
            client.sendall(part)
        while more := client.recv(2**16):
            told += more
    except OSError:  # reset while it sends: what came is in `told`, or still to be read
        pass
    return told


def refused(told):
    head, _, body = told.partition(b"\r\n\r\n")
    assert "message" in json.loads(body)["error"]
    return int(head.split()[1])


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (414, b"GET /" + b"x" * LONGEST_HEAD + b" HTTP/1.1\r\n\r\n"),
        (431, LINE + b"a:\r\n" * 3000 + b"\r\n"),
        (431, LINE + b"a: " + b"x" * LONGEST_HEAD + b"\r\n\r\n"),
        (400, b"\x16\x03\x01 no HTTP\r\n\r\n"),
    ],
)
def test_what_is_ahead_of_a_body_is_bounded(url, status, sent):
    with connected(url) as client:
        assert refused(answer(client, sent)) == status
    assert httpx.get(url).status_code == 200


@pytest.mark.parametrize("start", [b"GET /", LINE + b"a: ", LINE + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: "])
def test_a_head_that_never_ends_is_cut_off(url, start):
    """Its rest is not read: the parser would keep it all."""
    with connected(url) as client:
        sent, part = 0, b"x" * 2**16
        client.sendall(start)
        with pytest.raises(OSError):
            while sent < 2**26:
                client.sendall(part)
                sent += len(part)
        assert sent < 2**26


def test_the_usual_heads_are_taken(url):
    with connected(url) as client:
        headers = b"".join(b"x-%d: %s\r\n" % (each, b"y" * 200) for each in range(100))
        told = answer(client, b"GET /?" + b"q" * 8000 + b" HTTP/1.1\r\n" + headers + b"Connection: close\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET", LINE, LINE + b"Content-Length: 5\r\n\r\n", LINE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n"],
    ids=["nothing", "a line", "a header", "a body", "a chunk"],
)
def test_who_sends_no_more_is_let_go(hasty, sent):
    with connected(hasty) as client:
        told = answer(client, sent)
        assert told == b"" or told.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 200 "))


def test_who_dribbles_is_let_go(hasty):
    """A byte now and then keeps no connection."""
    with connected(hasty) as client, pytest.raises(OSError):
        client.sendall(LINE)
        for _ in range(10_000):
            client.sendall(b"a")
            select.select([], [], [], 0.01)


def test_connections_past_the_most_are_refused(hasty):
    held = [connected(hasty) for _ in range(4)]
    with connected(hasty) as client:
        assert refused(answer(client)) == 503
    for each in held:
        each.close()
    until(lambda: is_served(hasty))


def is_served(url):
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_requests_that_wait_for_their_turn_are_bounded(url):
    with connected(url) as client, pytest.raises(OSError):
        while True:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
    with connected(url) as client:
        asked = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (MOST_PIPELINED - 1)
        told = answer(client, asked + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert told.count(b"HTTP/1.1 200 ") == MOST_PIPELINED


async def counts(scope, receive, send):
    """Tells of each second until the client has gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    gone = asyncio.ensure_future(_gone(receive))
    while not gone.done():
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await asyncio.sleep(0.01)
    ENDED.append(scope["path"])


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_call_with_another_behind_it_is_told_that_its_client_has_gone():
    ENDED.clear()
    with running(counts) as url:
        with connected(url) as client:
            client.sendall(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(10)
        until(lambda: ENDED)
    assert ENDED[0] == "/first"


def test_a_connection_is_reset_without_a_free_descriptor(monkeypatch):
    """os.dup raised, the reader who stood still kept its call for ever."""
    told, ours = socket.socketpair()
    connection = Connection.__new__(Connection)
    aborted = []
    connection.transport = SimpleNamespace(get_extra_info=lambda name: told, abort=lambda: aborted.append(1))
    monkeypatch.setattr(os, "dup", lambda number: (_ for _ in ()).throw(OSError("none left")))
    connection._reset()
    assert aborted and told.fileno() >= 0
    told.close(), ours.close()


PROGRAM = """
from specstep.runtime.engine import Engine
from fake_session import FakeSession
from specstep.serving.options import ServeOptions
from specstep.serving.server import listen, serve

with listen("127.0.0.1", 0) as bound, Engine(FakeSession(1), None) as engine:
    serve({"fake": engine}, bound, ServeOptions(api_keys=("secret",)), 0)
"""


def test_clients_close_a_connection_at_rest_first():
    """A soak lost a call whose connection the server closed just then."""
    expiry = inspect.signature(httpx.Limits).parameters["keepalive_expiry"].default
    assert configured(app, ServeOptions()).timeout_keep_alive > 2 * expiry


def test_memory_stays_level_without_a_key():
    """20 MiB of headers took 550 MiB."""
    places = [str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    server = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        url = server.stderr.readline().split()[-1]
        before = memory(server.pid)
        for sent in (LINE + b"a:\r\n" * 2**22, LINE + b"a: " + b"x" * 2**24, b"GET /" + b"x" * 2**24):
            with connected(url) as client:
                answer(client, sent)
        assert memory(server.pid) - before < 2**24
    finally:
        server.kill()
        server.communicate()


def memory(process):
    """Bytes of a process, those of mapped files left out."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024

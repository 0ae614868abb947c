"""Places, disconnects, failures and the end, over a session without a model."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
from fake_session import POISON, FakeSession, alone
from models import tiny_tokenizer
from served import PATIENCE, is_idle, post, running, until
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.app import create_app
from specstep.serving.forms import CompletionForm
from specstep.serving.options import ServeOptions

PATH = "/v1/completions"
TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})


@pytest.fixture
def fake():
    """A slow engine of two rows, and a server of it where one answer may wait."""
    engine = Engine(FakeSession(2, pause=0.01), TEXT)
    with engine, running(create_app({"fake": engine}, ServeOptions(max_queue=1))) as url:
        yield engine, url
        until(lambda: is_idle(engine))


def level(url, name):
    page = httpx.get(url + "/metrics").text
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"specstep_{name}{{"))


def stream(url, prompt, **more):
    """A streamed call of greedy token ids."""
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": True, **more}
    return httpx.stream("POST", url + PATH, json=body, timeout=PATIENCE)


def test_a_full_queue_answers_429_and_goes_on_when_there_is_room(fake):
    engine, url = fake
    engine.session.pause = 0.1  # so that nothing ends before it is looked at
    with stream(url, [5]) as first, stream(url, [6]) as second, stream(url, [7]) as third:
        until(lambda: level(url, "waiting") == 1)
        got = post(url, PATH, prompt=[8], max_tokens=2)
        assert got.status_code == 429 and 1 <= int(got.headers["Retry-After"]) <= 60
        assert got.json()["error"]["code"] == "queue_full"
        assert httpx.get(url + "/health").status_code == 200
        engine.session.pause = 0.0
        for each in (first, second, third):
            assert each.read().endswith(b"data: [DONE]\n\n")
    got = post(url, PATH, prompt=[8], max_tokens=2, temperature=0)
    assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 2
    assert level(url, "running") == level(url, "waiting") == 0


def test_more_choices_than_there_are_places_is_the_client_s_error(fake):
    _, url = fake
    got = post(url, PATH, prompt=[[5], [6]], n=2, max_tokens=2)
    assert got.status_code == 400 and got.json()["error"]["param"] == "n"


def test_one_call_leaves_places_to_others(fake):
    _, url = fake
    got = post(url, PATH, prompt=[5], n=3, temperature=1, max_tokens=2)
    assert got.status_code == 400 and "at most 2 choices" in got.json()["error"]["message"]
    assert post(url, PATH, prompt=[5], n=2, temperature=1, max_tokens=2).status_code == 200


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_row_within_a_step(fake, streamed):
    engine, url = fake
    engine.session.pause = 0.2
    with connected(url) as client:
        client.sendall(request_of({"prompt": [5], "max_tokens": 99, "temperature": 0, "stream": streamed}))
        until(lambda: engine.session.free_rows == 1)
    before = engine.session.steps
    until(lambda: is_idle(engine))
    assert engine.session.steps <= before + 2  # the one under way, and the one that had begun when the news came


def test_one_who_waits_and_goes_away_leaves_the_queue(fake):
    engine, url = fake
    engine.session.pause = 0.1
    with stream(url, [5]) as first, stream(url, [6]) as second:
        with stream(url, [7]):
            until(lambda: level(url, "waiting") == 1)
        until(lambda: level(url, "waiting") == 0)
        engine.session.pause = 0.0
        for each in (first, second):
            assert each.read().endswith(b"data: [DONE]\n\n")


def test_failures_are_told_and_the_next_call_is_answered(fake):
    engine, url = fake
    got = post(url, PATH, prompt=[*range(10), POISON, 1], max_tokens=5)
    assert got.status_code == 500 and got.json()["error"]["type"] == "server_error"
    assert "a prompt that fails" not in got.text
    with stream(url, [5]) as response:
        lines = response.iter_lines()
        next(lines)
        engine.session.failing = 1
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["type"] == "server_error"
    got = post(url, PATH, prompt=[5], max_tokens=9, temperature=0)
    assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == len(alone([5], 10))
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE).text
    counted = {line.split('"')[3]: float(line.split()[-1]) for line in page.splitlines() if "answers_total{" in line}
    assert counted["failed"] == 2 and "cancelled" not in counted


def test_an_engine_that_is_closed_answers_503(fake):
    engine, url = fake
    with stream(url, [5]) as response:
        lines = response.iter_lines()
        next(lines)
        closing = threading.Thread(target=engine.close)
        closing.start()
        assert "shuts down" in [line for line in lines if line][-1]
    closing.join(PATIENCE)
    assert post(url, PATH, prompt=[5]).status_code == 503
    assert [httpx.get(url + path).status_code for path in ("/health", "/readyz", "/livez")] == [503, 503, 200]


def test_an_engine_that_breaks_is_seen(fake):
    engine, url = fake
    assert httpx.get(url + "/health").status_code == 200
    engine.session._reset = lambda row: (_ for _ in ()).throw(RuntimeError("the device is gone"))
    assert post(url, PATH, prompt=[5], max_tokens=3, temperature=0).status_code in (200, 500)
    until(lambda: engine.broken)
    assert [httpx.get(url + path).status_code for path in ("/health", "/readyz", "/livez")] == [503] * 3
    assert post(url, PATH, prompt=[5]).status_code == 503


def test_a_client_that_stops_reading_keeps_no_place_and_is_let_go(monkeypatch):
    """Its chunks are long: what the kernel takes for it is soon full."""
    monkeypatch.setattr(CompletionForm, "grown", lambda self, index, text, logprobs: {"text": "x" * 2**24})
    engine = Engine(FakeSession(1), TEXT)
    options = ServeOptions(send_seconds=0.5, stream_interval_ms=0)
    with engine, running(create_app({"fake": engine}, options), options) as url:
        body = {"prompt": [5], "max_tokens": 90, "temperature": 0, "stream": True}
        with connected(url, receive=2**14) as client:
            client.sendall(request_of(body))
            until(lambda: engine.session.steps and is_idle(engine))
            assert post(url, PATH, prompt=[5], max_tokens=2, temperature=0).status_code == 200
            until(lambda: cut_off(client))


def connected(url, receive=None):
    """A connection to a server."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.connect((host, int(port)))
    return client


def request_of(body):
    content = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def cut_off(client):
    """Whether the other side has reset a connection, seen without reading."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLRDHUP) for _, event in poll.poll(0))


PROGRAM = """
import sys
from fake_session import FakeSession
from specstep.runtime.engine import Engine
from specstep.serving.options import ServeOptions
from specstep.serving.server import listen, serve

with listen("127.0.0.1", 0) as bound, Engine(FakeSession(1, pause=0.1), None) as engine:
    if len(sys.argv) > 2:
        engine.session._reset = lambda row: (_ for _ in ()).throw(RuntimeError("the device is gone"))
    fault = serve({"fake": engine}, bound, ServeOptions(), int(sys.argv[1]))
print(fault or "closed")
"""


@pytest.fixture
def process():
    """Starts servers in processes of their own -> each with its address."""
    started = []
    places = [str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}

    def start(drain, *more):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        one = subprocess.Popen([sys.executable, "-c", PROGRAM, str(drain), *more], **options)
        started.append(one)
        line = one.stderr.readline()
        assert line.startswith("specstep: serving fake at http://127.0.0.1:"), line + one.stderr.read()
        return one, line.split()[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_shutdown_lets_answers_end(process, number):
    server, url = process(PATIENCE)
    with stream(url, [5], max_tokens=30) as response:
        until(lambda: level(url, "running") == 1)
        server.send_signal(number)
        assert response.read().endswith(b"data: [DONE]\n\n")
    out, _ = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (0, "closed\n")


@pytest.mark.parametrize("again", [None, signal.SIGTERM, signal.SIGINT])
def test_a_shutdown_is_bounded(process, again):
    """By its time to drain, or by a second signal. Answers under way say so, in the form of errors."""
    server, url = process(PATIENCE if again else 0)
    with stream(url, [5], max_tokens=99) as streamed, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, url, PATH, prompt=[6], max_tokens=99, temperature=0)
        until(lambda: level(url, "running") == level(url, "waiting") == 1)
        server.send_signal(signal.SIGTERM)
        if again:
            until(lambda: not reachable(url))
            server.send_signal(again)
        assert b'"type":"server_error"' in streamed.read().splitlines()[-2]
        whole = waiting.result()
        assert whole.status_code == 503 and whole.json()["error"]["message"] == "the server shuts down"
        out, errors = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (0, "closed\n") and "Traceback" not in errors


def reachable(url):
    """Whether a server takes connections."""
    try:
        connected(url).close()
    except OSError:
        return False
    return True


def test_a_server_whose_engine_breaks_ends_by_itself(process):
    server, url = process(PATIENCE, "broken")
    post(url, PATH, prompt=[5], max_tokens=3, temperature=0)
    out, _ = server.communicate(timeout=PATIENCE)
    assert out == "engine: fake: expected one that runs, got RuntimeError: the device is gone; start again\n"

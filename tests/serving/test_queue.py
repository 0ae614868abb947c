"""Places, disconnects, failures and the end, over a session without a model."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2 as httpx
import pytest
from fake_session import POISON, FakeSession, alone
from models import tiny_tokenizer
from served import PATIENCE, is_idle, post, running, until
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.app import create_app
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
    _, url = fake
    with stream(url, [5]) as first, stream(url, [6]) as second, stream(url, [7]) as third:
        until(lambda: level(url, "waiting") == 1)
        got = post(url, PATH, prompt=[8], max_tokens=2)
        assert got.status_code == 429 and 1 <= int(got.headers["Retry-After"]) <= 60
        assert got.json()["error"]["code"] == "queue_full"
        assert httpx.get(url + "/health").status_code == 200
        for each in (first, second, third):
            assert each.read().endswith(b"data: [DONE]\n\n")
    got = post(url, PATH, prompt=[8], max_tokens=2, temperature=0)
    assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 2
    assert level(url, "running") == level(url, "waiting") == 0


def test_more_choices_than_there_are_places_is_the_client_s_error(fake):
    _, url = fake
    got = post(url, PATH, prompt=[[5], [6]], n=2, max_tokens=2)
    assert got.status_code == 400 and got.json()["error"]["param"] == "n"


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_row_within_a_step(fake, streamed):
    engine, url = fake
    host, port = url.removeprefix("http://").split(":")
    import socket

    body = json.dumps({"prompt": [5], "max_tokens": 99, "temperature": 0, "stream": streamed}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    engine.session.pause = 0.2
    with socket.create_connection((host, int(port))) as client:
        client.sendall(head.encode() + body)
        until(lambda: engine.session.free_rows == 1)
    before = engine.session.steps
    until(lambda: is_idle(engine))
    assert engine.session.steps <= before + 2  # the one under way, and the one that had begun when the news came


def test_one_who_waits_and_goes_away_leaves_the_queue(fake):
    _, url = fake
    with stream(url, [5]) as first, stream(url, [6]) as second:
        with stream(url, [7]):
            until(lambda: level(url, "waiting") == 1)
        until(lambda: level(url, "waiting") == 0)
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


PROGRAM = """
import sys
from fake_session import FakeSession
from specstep.runtime.engine import Engine
from specstep.serving.options import ServeOptions
from specstep.serving.server import listen, serve

with listen("127.0.0.1", 0) as bound, Engine(FakeSession(1, pause=0.02), None) as engine:
    serve({"fake": engine}, bound, ServeOptions(), int(sys.argv[1]))
print("closed")
"""


@pytest.fixture
def process():
    """Starts servers in processes of their own -> each with its address."""
    started = []
    places = [str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}

    def start(drain):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        one = subprocess.Popen([sys.executable, "-c", PROGRAM, str(drain)], **options)
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
    with stream(url, [5]) as response:
        until(lambda: level(url, "running") == 1)
        server.send_signal(number)
        assert response.read().endswith(b"data: [DONE]\n\n")
    out, _ = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (0, "closed\n")


def test_a_shutdown_is_bounded(process):
    server, url = process(0)
    with stream(url, [5], max_tokens=99):
        until(lambda: level(url, "running") == 1)
        server.send_signal(signal.SIGTERM)
        out, _ = server.communicate(timeout=PATIENCE)
    assert (server.returncode, out) == (0, "closed\n")

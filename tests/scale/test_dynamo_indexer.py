"""Dynamo's own index of prefix caches, fed by our KV events."""

import socket
import subprocess
import sys

import httpx2 as httpx
import pytest
from fake_session import FakeSession
from served import PATIENCE, until
from specstep.runtime.engine import Engine
from specstep.runtime.prefix_cache import BLOCK
from specstep.serving.kv_zmq import published

pytestmark = pytest.mark.scale
pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime: make test-scale installs it")
pytest.importorskip("zmq")

LONG = [(7 * index + index * index) % 90 for index in range(99)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def index():
    """Matched tokens of a prompt as the index says, and where it subscribes."""
    port, events = free_port(), free_port()
    options = ["--block-size", str(BLOCK), "--port", str(port), "--threads", "1"]
    command = [sys.executable, "-m", "dynamo.indexer", *options, "--workers", f"1=tcp://127.0.0.1:{events}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def matched(tokens):
        body = {"token_ids": tokens, "model_name": "default"}
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/query", json=body, timeout=PATIENCE)
        except httpx.TransportError:
            return None
        return answer.json()["scores"].get("1", {}).get("0", 0) if answer.status_code == 200 else None

    yield matched, f"tcp://*:{events}"
    process.kill()
    process.wait()


def test_it_finds_what_the_cache_has_and_forgets_what_it_let_go(index):
    matched, endpoint = index
    with (
        Engine(FakeSession(1), None, prefix_cache_bytes=3 * BLOCK * 8, kv_events=True) as engine,
        published(engine.kv_events, endpoint),
    ):
        engine.generate([LONG[:70]], 4)
        until(lambda: matched(LONG[:70]) == 64)
        assert matched(LONG[:40]) == 32 and matched(LONG[3:73]) == 0
        for start in (5, 9):
            engine.generate([LONG[start : start + 70]], 4)
        until(lambda: matched(LONG[9:79]) == 64)
        assert matched(LONG[:70]) == 0

"""A worker of Dynamo behind Dynamo's own HTTP frontend: the answers are the engine's."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
import specstep
from fake_session import FakeSession
from kv_reader import Reader, kept
from served import PATIENCE, is_idle, until, user
from specstep.runtime.engine import Engine
from specstep.runtime.prefix_cache import BLOCK
from specstep.serving.server import listen

pytestmark = pytest.mark.scale
pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime: make test-scale installs it")

ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 3, "max_seq_len": 192, "prefill_chunk": 16}
FRONTEND = """
import asyncio, sys
from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input
from dynamo.runtime import DistributedRuntime

async def main():
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    args = EntrypointArgs(EngineType.Dynamic, http_host="127.0.0.1", http_port=int(sys.argv[1]))
    await run_input(runtime, "http", await make_engine(runtime, args))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def engine(model_folder):
    with specstep.eager(str(model_folder), **ENGINE) as plain:
        parts = plain.session, plain.text, plain.recommended, plain.tools
        engine = Engine(*parts, prefix_cache_bytes=2**24, learning=False, kv_events=True)
        yield engine
        engine.close()


@pytest.fixture(scope="module")
def address(engine, tmp_path_factory):
    """The frontend, once it knows the model."""
    from dynamo.runtime import DistributedRuntime
    from specstep.serving.dynamo.worker import serve

    with pytest.MonkeyPatch.context() as patch, listen("127.0.0.1", 0) as bound:
        patch.setenv("DYN_FILE_KV", str(tmp_path_factory.mktemp("discovery")))
        port = bound.getsockname()[1]

        async def work():
            runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
            await serve(runtime, engine, "tiny", "tests.backend.generate", max_queue=2)

        bound.close()
        threading.Thread(target=lambda: asyncio.run(work()), daemon=True).start()
        command = [sys.executable, "-c", FRONTEND, str(port)]
        frontend = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: knows(url))
            yield url
        finally:
            frontend.kill()
            frontend.wait()


def knows(url):
    try:
        return httpx.get(url + "/v1/models", timeout=PATIENCE).json()["data"]
    except httpx.TransportError:
        return False


def chat(url, **asked):
    body = {"model": "tiny", "messages": user("hello you"), "max_tokens": 20, "temperature": 0, **asked}
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=PATIENCE)


def test_answers_are_the_engine_s(engine, address):
    expected = engine.generate(user("hello you"), 20)
    for _ in range(2):
        got = chat(address).json()
        assert got["choices"][0]["message"]["content"] == expected.text
        assert got["usage"]["completion_tokens"] == len(expected.token_ids)
        assert got["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    sampled = {"temperature": 0.7, "top_k": 9, "seed": 5}
    body = {"model": "tiny", "prompt": "hello you", "max_tokens": 20, **sampled}
    got = httpx.post(address + "/v1/completions", json=body, timeout=PATIENCE).json()
    assert got["choices"][0]["text"] == engine.generate("hello you", 20, sampling=sampled).text


def test_what_is_not_supported_is_refused_by_name(address):
    for field, asked in {
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "guided_decoding": {"response_format": {"type": "json_object"}},
    }.items():
        answer = chat(address, **asked)
        assert answer.status_code == 400 and field in answer.text, answer.text


def test_a_client_that_goes_away_frees_its_row(engine, address):
    body = {"model": "tiny", "messages": user("hello"), "max_tokens": 150, "temperature": 0, "stream": True}
    with httpx.stream("POST", address + "/v1/chat/completions", json=body, timeout=PATIENCE) as response:
        next(response.iter_raw())
    until(lambda: is_idle(engine))


def test_more_than_may_wait_are_told_to_come_again(engine, address):
    """3 rows and 2 that wait: of 12 at once some are refused, none is lost, and the places come back."""
    asked = {"max_tokens": 120, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: chat(address, **asked), range(12)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 5, [answer.text for answer in answers]
    until(lambda: is_idle(engine))
    assert chat(address).status_code == 200


def test_a_worker_whose_engine_breaks_ends_with_a_line(engine_folder, breaks, tmp_path):
    """Routers know of one worker less, and whoever runs it starts another."""
    planes = {"DYN_DISCOVERY_BACKEND": "file", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    environment = os.environ | planes | {"DYN_FILE_KV": str(tmp_path / "discovery")}
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    command = [sys.executable, "-m", "specstep.serving.dynamo.worker", str(engine_folder), "--name", "tiny"]
    worker = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    frontend = subprocess.Popen(
        [sys.executable, "-c", FRONTEND, str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: knows(url))
        assert chat(url).status_code == 200
        breaks.write_text(str(worker.pid))
        time.sleep(1)  # until the process has seen it
        chat(url)
        _, said = worker.communicate(timeout=PATIENCE)
        assert worker.returncode == 70, said
        assert "specstep: engine: expected one that runs, got RuntimeError: the device is gone" in said
        until(lambda: not knows(url))
    finally:
        for process in (frontend, worker):
            process.kill()
            process.wait()


class Publisher(Reader):
    """What Dynamo would be told."""

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash=None):
        assert num_block_tokens == [BLOCK] * len(block_hashes)
        told = {"block_hashes": block_hashes, "parent_block_hash": parent_hash, "token_ids": token_ids}
        self._BlockStored({**told, "block_size": BLOCK})

    def publish_removed(self, block_hashes):
        self._BlockRemoved({"block_hashes": block_hashes})


def test_routers_are_told_what_the_cache_has(monkeypatch):
    """Also where the log has gone on without the worker."""
    from specstep.serving.dynamo import worker

    long = [(7 * index + index * index) % 90 for index in range(99)]
    engine, publisher = Engine(FakeSession(1), None, prefix_cache_bytes=5 * BLOCK * 8, kv_events=True), Publisher()

    async def told():
        task = asyncio.ensure_future(worker.publish(engine.kv_events, publisher))
        for start in range(0, 60, 3):
            engine.generate([long[start : start + 39]], 4)
            if start % 9 == 0:
                await asyncio.sleep(2 * worker.INTERVAL)
                assert sorted(publisher.blocks.values()) == kept(engine)
        task.cancel()

    monkeypatch.setattr(worker, "INTERVAL", 0.01)
    monkeypatch.setattr(engine.kv_events, "_most", 4)
    asyncio.run(told())
    engine.close()

"""`/kv_events`: a reader that comes early, late, again or slowly knows what the prefix cache has, in vLLM's shapes."""

import asyncio
import contextlib
import time

import httpx2 as httpx
import pytest
from fake_session import FakeSession
from fastapi.testclient import TestClient
from kv_reader import Reader, kept, parsed
from served import PATIENCE, is_idle, post, running, until
from specstep.errors import InputError
from specstep.runtime.engine import Engine
from specstep.runtime.kv_events import KVEvents
from specstep.runtime.prefix_cache import BLOCK
from specstep.serving.app import create_app
from specstep.serving.kv_batches import PIECE
from specstep.serving.kv_stream import KVEventStream
from specstep.serving.options import ServeOptions
from specstep.serving.served import Served

BLOCK_BYTES = BLOCK * 2 * 4  # of the fake session
LONG = [(7 * index + index * index) % 90 for index in range(99)]
ON = ServeOptions(kv_events=True)


@pytest.fixture
def telling():
    """A server of an engine whose prefix cache holds 5 blocks."""
    with (
        Engine(FakeSession(2), None, prefix_cache_bytes=5 * BLOCK_BYTES, kv_events=True) as engine,
        running(create_app({"fake": engine}, ON)) as url,
    ):
        yield engine, url


def ask(engine, url, prompt):
    assert post(url, "/v1/completions", prompt=prompt, max_tokens=4, temperature=0).status_code == 200
    until(lambda: is_idle(engine))


def stream(url, **headers):
    return httpx.stream("GET", url + "/kv_events", headers=headers, timeout=PATIENCE)


def read_until(reader, events, true):
    """Follow a stream until something is true -> the last id."""
    last = None
    for number, batch in events:
        reader.apply(batch)
        last = number or last
        if true():
            return last
    raise AssertionError("the stream ended")


def test_a_reader_follows_comes_again_and_comes_late(telling):
    engine, url = telling
    first, again, late, wrong = Reader(), Reader(), Reader(), Reader()
    with stream(url) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = parsed(response.iter_lines())
        read_until(first, events, lambda: first.cleared)
        assert first.blocks == {}
        ask(engine, url, LONG[:70])
        last = read_until(first, events, lambda: len(first.blocks) == len(kept(engine)) == 2)
    again.blocks = dict(first.blocks)
    for start in (5, 9, 20):
        ask(engine, url, LONG[start : start + 70])
    with stream(url, **{"Last-Event-ID": last}) as response:
        read_until(again, parsed(response.iter_lines()), lambda: sorted(again.blocks.values()) == kept(engine))
    for reader, headers in ((late, {}), (wrong, {"Last-Event-ID": "0123456789abcdef-2"})):
        with stream(url, **headers) as response:
            read_until(reader, parsed(response.iter_lines()), lambda reader=reader: reader.cleared)
        assert reader.blocks == again.blocks and len(reader.blocks) == 5
    assert again.cleared == 0


def test_batches_have_vllm_s_fields(telling):
    engine, url = telling
    ask(engine, url, LONG[:70])
    with stream(url) as response:
        _, batch = next(parsed(response.iter_lines()))
    assert [event["type"] for event in batch["events"]] == ["AllBlocksCleared", "BlockStored"]
    stored = batch["events"][1]
    assert stored["token_ids"] == LONG[: 2 * BLOCK] and stored["parent_block_hash"] is None
    assert (stored["block_size"], stored["medium"], stored["lora_id"]) == (BLOCK, "GPU", None)
    assert abs(batch["ts"] - time.time()) < PATIENCE


def test_a_stream_ends_with_its_engine_and_does_not_keep_the_server(telling):
    engine, url = telling
    other = Engine(FakeSession(1), None, prefix_cache_bytes=BLOCK_BYTES, kv_events=True)
    with other, contextlib.ExitStack() as open_, running(create_app({"other": other}, ON)) as second:
        lines = open_.enter_context(stream(second)).iter_lines()
        next(lines)  # still open while the server shuts down, which `running` waits for
    with stream(url) as response:
        lines = response.iter_lines()
        next(lines)
        engine.close()
        assert not [line for line in lines if line.startswith("data") and "Stored" in line]


def test_a_slow_reader_holds_nothing_and_begins_anew():
    """One that takes the first event, and no more while the log goes on without it."""
    engine = Engine(FakeSession(1), None, prefix_cache_bytes=BLOCK_BYTES, kv_events=True)
    events, reader, sent, more = KVEvents(most_blocks=8), Reader(), [], asyncio.Event()
    told = KVEventStream(Served("fake", engine, 1, True), events, None)

    async def receive():
        await asyncio.sleep(PATIENCE)

    async def send(message):
        sent.append(message)
        if len(sent) > 2:
            await more.wait()

    async def read():
        task = asyncio.ensure_future(told({"state": {}}, receive, send))
        for number in range(1000):
            events.stored("", [(number, (number,) * BLOCK)])
            if number >= 2 * PIECE:
                events.removed([number - 2 * PIECE])
            await asyncio.sleep(0)
        assert len(sent) <= 3 and len(events._log) == 8
        more.set()
        while {tokens[0] for tokens in reader.blocks.values()} != set(range(1000 - 2 * PIECE, 1000)):
            await asyncio.sleep(0.01)
            for message in sent[1:]:
                for _, batch in parsed(message["body"].decode().splitlines()):
                    reader.apply(batch)
            del sent[1:]
        task.cancel()

    asyncio.run(asyncio.wait_for(read(), 60))
    assert reader.cleared >= 2


def test_who_may_read():
    prefixes = {"prefix_cache_bytes": BLOCK_BYTES}
    with (
        Engine(FakeSession(1), None, **prefixes) as silent,
        Engine(FakeSession(1), None, kv_events=True, **prefixes) as e,
    ):
        with TestClient(create_app({"fake": e})) as client:
            assert client.get("/kv_events").status_code == 404
        with TestClient(create_app({"fake": e}, ServeOptions(api_keys=("one",), kv_events=True))) as client:
            assert client.get("/kv_events").status_code == 401
            key = {"Authorization": "Bearer one"}
            assert client.get("/kv_events?model=other", headers=key).json()["error"]["code"] == "model_not_found"
        with pytest.raises(InputError, match="kv-events: expected one API key at most"):
            ServeOptions(api_keys=("one", "two"), kv_events=True)
        with pytest.raises(InputError, match="kv-events: expected engines that were loaded with kv_events=True, got x"):
            create_app({"x": silent}, ON)

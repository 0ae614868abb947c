"""KV events over ZeroMQ: a subscriber as llm-d and Dynamo have one knows what the prefix cache has."""

import pytest
from fake_session import FakeSession
from kv_reader import Reader, kept
from served import PATIENCE
from specstep.errors import InputError
from specstep.runtime.engine import Engine
from specstep.runtime.prefix_cache import BLOCK
from specstep.serving.kv_zmq import published

zmq = pytest.importorskip("zmq")
msgpack = pytest.importorskip("msgpack")

BLOCK_BYTES = BLOCK * 2 * 4  # of the fake session
LONG = [(7 * index + index * index) % 90 for index in range(99)]
FIELDS = {  # of vLLM's structures, in their order
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


@pytest.fixture
def engine():
    with Engine(FakeSession(1), None, prefix_cache_bytes=5 * BLOCK_BYTES, kv_events=True) as engine:
        yield engine


@pytest.fixture
def subscriber():
    """A socket that binds, as llm-d's does in the midst of a cluster."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set(zmq.RCVTIMEO, PATIENCE * 1000)
        socket.subscribe("kv@")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


def ask(engine, prompt):
    engine.generate([prompt], 4)


def follow(reader, socket, true):
    """Read messages until something is true -> their topics and numbers."""
    heads = []
    while not true():
        topic, number, payload = socket.recv_multipart()
        _, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        for kind, *values in events:
            assert len(values) == len(FIELDS[kind])
            reader.apply({"events": [{"type": kind, **dict(zip(FIELDS[kind], values, strict=True))}]})
        heads.append((topic, int.from_bytes(number, "big")))
    return heads


def test_a_subscriber_knows_what_the_cache_has(engine, subscriber):
    socket, endpoint = subscriber
    ask(engine, LONG[:70])
    reader = Reader()
    with published(engine.kv_events, endpoint, "kv@127.0.0.1:8000@fake"):
        heads = follow(reader, socket, lambda: sorted(reader.blocks.values()) == kept(engine))
        for start in (5, 9, 20):
            ask(engine, LONG[start : start + 70])
        heads += follow(reader, socket, lambda: sorted(reader.blocks.values()) == kept(engine))
    assert len(reader.blocks) == 5 and reader.cleared
    assert {topic for topic, _ in heads} == {b"kv@127.0.0.1:8000@fake"}
    assert [number for _, number in heads] == [*range(len(heads))]


def test_one_who_subscribes_later_is_told_of_all(engine, tmp_path):
    """The publisher binds."""
    endpoint, readers = f"ipc://{tmp_path}/events*", (Reader(), Reader())
    with published(engine.kv_events, endpoint), zmq.Context() as context:
        ask(engine, LONG[:70])
        for count, reader in enumerate(readers, 1):
            with context.socket(zmq.SUB) as socket:
                socket.set(zmq.RCVTIMEO, PATIENCE * 1000)
                socket.subscribe("")
                socket.connect(endpoint)
                follow(reader, socket, lambda reader=reader: sorted(reader.blocks.values()) == kept(engine))
            assert reader.cleared and len(reader.blocks) == 1 + count
            ask(engine, LONG[40 * count :][:32])


def test_an_endpoint_that_cannot_be_is_refused(engine):
    with (
        pytest.raises(InputError, match=r"kv-events-zmq: expected an endpoint as tcp://\*:5557, got here"),
        published(engine.kv_events, "here"),
    ):
        pass

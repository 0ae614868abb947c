"""Events of a prefix cache over ZeroMQ, as vLLM publishes them, and llm-d and Dynamo read them: a topic, the number of
the message in 8 bytes, and a batch in msgpack whose structures are arrays."""

import contextlib
import threading
from collections.abc import Iterator
from itertools import count

from ..errors import InputError, needs_extra
from ..runtime.kv_events import KVEvents
from .kv_batches import INTERVAL, EventBatch, Follower

MOST_WAITING = 10_000  # messages to a subscriber who does not take them; it misses those after
SUBSCRIBED = b"\x01"  # what a message of a new subscriber begins with
LINGER_MS = 500  # for what is still to be sent at the end


@contextlib.contextmanager
def published(log: KVEvents, endpoint: str, topic: str = "") -> Iterator[None]:
    """While the block runs, publish what the log tells: all that is kept to each who comes to subscribe, and with it to
    the others, then what changes.

    Args:
        endpoint: bound where it has a * or begins with ipc:// or inproc://, as "tcp://*:5557"; connected to otherwise.
        topic: of all messages; llm-d reads "kv@POD@MODEL" of it, POD an address, or an address and a port.

    Raises:
        MissingPackageError: without the packages of the extra `zmq`.
        InputError: an endpoint that cannot be used.
    """
    with needs_extra("zmq", "kv-events-zmq"):
        import msgpack
        import zmq

    numbers, ended = count(), threading.Event()

    def message(told: EventBatch) -> list[bytes]:
        events = [list(event.values()) for event in told.events]  # the type first, then vLLM's order
        return [topic.encode(), next(numbers).to_bytes(8, "big"), msgpack.packb([told.time, events, 0])]

    def publish() -> None:
        follower: Follower | None = None  # nobody listens yet
        while True:
            while socket.poll(0):
                if socket.recv()[:1] == SUBSCRIBED:
                    follower = Follower(log)
            for told in follower.new() if follower else ():
                socket.send_multipart(message(told))
            if ended.wait(INTERVAL):
                return

    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:  # which sees who subscribes
        socket.set(zmq.XPUB_VERBOSE, True)
        socket.set(zmq.SNDHWM, MOST_WAITING)
        socket.set(zmq.LINGER, LINGER_MS)
        try:
            bound = "*" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            socket.bind(endpoint) if bound else socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise InputError(f"kv-events-zmq: expected an endpoint as tcp://*:5557, got {endpoint}: {error}") from None
        thread = threading.Thread(target=publish, name="specstep kv events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

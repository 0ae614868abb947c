"""Runs an engine as a worker of Dynamo.

python -m specstep.serving.dynamo.worker engines/smol --name smol

Discovery and transport are Dynamo's: DYN_DISCOVERY_BACKEND, DYN_REQUEST_PLANE, DYN_EVENT_PLANE in the environment.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo.llm import KvEventPublisher, ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import HttpError, InvalidArgument
from dynamo.runtime import DistributedRuntime, dynamo_worker

from ...errors import EXIT_BROKEN, InputError, SpecstepError
from ...runtime.engine import Engine
from ...runtime.kv_events import KVEvents
from ...runtime.load import load
from ...runtime.prefix_cache import BLOCK
from ..bridge import Answer
from ..kv_batches import INTERVAL, Follower
from ..places import Queue, QueueFullError, on_error
from .asked import request_of
from .card import write_card

ENDPOINT = "dynamo.backend.generate"
MAX_QUEUE = 128  # requests that may wait for a row
LOOK = 1.0  # seconds between two looks at whether the engine runs


class Worker:
    """Answers the calls of one engine, as many at once as have places. Belongs to one event loop."""

    def __init__(self, engine: Engine, max_queue: int):
        self._engine, self._queue = engine, Queue(engine.spec.max_batch, max_queue)

    async def generate(self, asked: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Token ids as they come, the last with the reason. Raises InvalidArgument for what the engine cannot take,
        HttpError where the queue is full."""
        try:
            places = self._queue.take(1)
        except QueueFullError as error:
            # WorkerUnavailable would have the router leave this worker alone for a while.
            raise HttpError(429, str(error)) from None
        with on_error(places):
            try:
                request = request_of(self._engine, asked)
            except InputError as error:
                raise InvalidArgument(str(error)) from None
            answer = Answer(self._engine, [request], places.give_back)
        watch = asyncio.ensure_future(_cancelled(context, answer))
        try:
            async for grown in answer.read():
                for each in grown:
                    reason = {"finish_reason": request.finish_reason} if request.finish_reason else {}
                    yield {"token_ids": each.token_ids, **reason}
        finally:
            watch.cancel()
            answer.cancel()
            places.give_back()


async def _cancelled(context: Any, answer: Answer) -> None:
    """End an answer when its caller goes away."""
    await context.async_killed_or_stopped()
    answer.cancel()


async def publish(log: KVEvents, publisher: Any) -> None:
    """Tell Dynamo's routers which blocks the prefix cache keeps, for ever."""
    follower, known = Follower(log), set[int]()
    while True:
        for told in follower.new():
            for event in told.events:
                if event["type"] == "BlockStored":
                    sizes = [BLOCK] * len(event["block_hashes"])
                    hashes, parent = event["block_hashes"], event["parent_block_hash"]
                    publisher.publish_stored(event["token_ids"], sizes, hashes, parent)
                    known.update(hashes)
                else:
                    gone = event.get("block_hashes", list(known))  # all of them where the log has gone on without us
                    if gone:
                        publisher.publish_removed(gone)
                    known.difference_update(gone)
        await asyncio.sleep(INTERVAL)


async def end_broken(runtime: DistributedRuntime, engine: Engine) -> None:
    """Shut the runtime down when the engine breaks: routers then know of one worker less."""
    while engine.broken is None:
        await asyncio.sleep(LOOK)
    runtime.shutdown()


async def serve(runtime: DistributedRuntime, engine: Engine, name: str, path: str, max_queue: int = MAX_QUEUE) -> None:
    """Register an engine and answer until the runtime is shut down, which it is when the engine breaks. max_queue:
    requests that may wait for a row."""
    endpoint, config = runtime.endpoint(path), ModelRuntimeConfig()
    config.context_length, config.max_num_seqs = engine.spec.max_seq_len, engine.spec.max_batch
    config.total_kv_blocks = engine.cache_use.most_blocks or None
    surfaces = ModelType.Completions
    if engine.has_chat_template:
        surfaces = surfaces | ModelType.Chat
    with tempfile.TemporaryDirectory() as folder:
        write_card(engine, Path(folder))
        told = {"worker_type": WorkerType.Aggregated, "kv_cache_block_size": BLOCK, "runtime_config": config}
        await register_model(ModelInput.Tokens, surfaces, endpoint, folder, name, **told)
        beside = [asyncio.ensure_future(end_broken(runtime, engine))]
        if engine.kv_events is not None:
            publisher = KvEventPublisher(endpoint, kv_block_size=BLOCK)
            beside.append(asyncio.ensure_future(publish(engine.kv_events, publisher)))
        try:
            await endpoint.serve_endpoint(Worker(engine, max_queue).generate)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Load an engine and serve it -> exit status: 0, 2 where it cannot be, 70 where it broke, each with one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--name", help="the model's name (default: that of the folder)")
    parser.add_argument("--endpoint", default=ENDPOINT, help=f"NAMESPACE.COMPONENT.ENDPOINT (default: {ENDPOINT})")
    parser.add_argument("--prefix-cache", type=int, default=256, metavar="MIB")
    parser.add_argument("--prefill-per-step", type=int, default=64, metavar="N")
    parser.add_argument(
        "--max-queue", type=int, default=MAX_QUEUE, metavar="N", help=f"wait for a row (default: {MAX_QUEUE})"
    )
    given = parser.parse_args(arguments)
    if given.max_queue < 0:
        parser.error(f"--max-queue: expected at least 0, got {given.max_queue}")

    fault: list[BaseException] = []

    @dynamo_worker()
    async def run(runtime: DistributedRuntime) -> None:
        kept = given.prefix_cache * 2**20
        how: Any = {"prefix_cache_bytes": kept, "prefill_per_step": given.prefill_per_step, "kv_events": bool(kept)}
        with load(given.engine, **how) as engine:
            name = given.name or given.engine.resolve().name
            await serve(runtime, engine, name, given.endpoint, given.max_queue)
            fault.extend([engine.broken] if engine.broken else [])

    try:
        asyncio.run(run())
    except SpecstepError as error:
        print(f"specstep: {error}", file=sys.stderr)
        return 2
    if fault:
        print(f"specstep: engine: expected one that runs, got {type(fault[0]).__name__}: {fault[0]}", file=sys.stderr)
    return EXIT_BROKEN if fault else 0


if __name__ == "__main__":
    raise SystemExit(main())

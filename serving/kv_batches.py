"""The events of a prefix cache in vLLM's shapes and order of fields: what a reader of the log does not have yet."""

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..runtime.kv_events import KeptBlock, KVEvents
from ..runtime.prefix_cache import BLOCK

INTERVAL = 0.05  # seconds from one look at the log to the next: nobody has to wake a reader
PIECE = 64  # blocks of a snapshot in one batch
CLEARED = {"type": "AllBlocksCleared"}
# vLLM has this word for the cache that it computes with, on a CPU too; others are tiers behind it.
MEDIUM = "GPU"


class EventBatch(NamedTuple):
    """A batch. number: of the log's last batch that a reader has with it; None in the midst of a snapshot."""

    time: float
    events: list[dict[str, Any]]
    number: int | None


class Follower:
    """One reader's place in a log. It keeps no more; where the log has gone on without it, or it is new, it is told
    that all is cleared, and then of all blocks that are kept."""

    def __init__(self, log: KVEvents, number: int | None = None):
        """number: of the last batch that the reader has, None for one who has nothing."""
        self._log, self._number = log, number

    def new(self) -> Iterator[EventBatch]:
        """What the reader does not have yet."""
        batches = None if self._number is None else self._log.since(self._number)
        if batches is None:
            self._number, kept = self._log.snapshot()
            yield from _snapshot(self._number, kept)
            return
        for batch in batches:
            self._number, events = batch.number, []
            if batch.removed:
                events.append({"type": "BlockRemoved", "block_hashes": list(batch.removed), "medium": MEDIUM})
            yield EventBatch(batch.time, [*events, *_stored(batch.stored)], batch.number)


def _snapshot(number: int, kept: list[KeptBlock]) -> Iterator[EventBatch]:
    """All that is kept. Only the last batch has a number: a reader who is cut off ahead of it begins anew."""
    now, told = time.time(), [CLEARED]
    for start in range(0, max(len(kept), 1), PIECE):
        last = start + PIECE >= len(kept)
        yield EventBatch(now, [*told, *_stored(kept[start : start + PIECE])], number if last else None)
        told = []


def _stored(blocks: Iterable[KeptBlock]) -> Iterator[dict[str, Any]]:
    """An event for each run of blocks of which each follows the one before."""
    run: list[KeptBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].hash:
            yield _stored_run(run)
            run = []
        run.append(block)
    if run:
        yield _stored_run(run)


def _stored_run(run: list[KeptBlock]) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [block.hash for block in run],
        "parent_block_hash": run[0].parent,
        "token_ids": [token for block in run for token in block.tokens],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }

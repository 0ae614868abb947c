"""What stands around replicas costs in a process, measured here: seconds of a core."""

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CHUNK_S = (
    1e-4  # of the server's process for a chunk of a stream, LOG.md#streams-wait-40-ms-at-most-httptools-and-uvloop
)
SCRAPE_S = 0.05  # from one look at the metrics of a replica to the next: assumed, often enough to route by


def measured() -> dict[str, float]:
    """Seconds for a page of /metrics; for a block that the prefix cache tells of; for a router to read of it."""
    from specstep.runtime.kv_events import KVEvents
    from specstep.runtime.prefix_cache import BLOCK
    from specstep.runtime.scheduler import CacheUse, Occupancy
    from specstep.serving.metrics import Metrics

    engine = SimpleNamespace(occupancy=Occupancy(3, 16), cache_use=CacheUse(4000, 32768, 300, 364))
    served: Any = SimpleNamespace(name="smollm2-135m", rows=16, engine=engine)
    metrics = Metrics([served])
    for route in ("/v1/chat/completions", "/v1/completions", "/metrics"):
        metrics.called(route, 200, 0.1)
    events, numbers = KVEvents(), iter(range(10**9))

    def tell() -> None:
        number = next(numbers)
        events.stored("", [(number, tuple(range(number, number + BLOCK)))])

    hashes = [2**62 + 1]
    told = json.dumps({
        "ts": time.time(), "events": [{
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": 2**61 + 1, "medium": "CPU",
            "token_ids": list(range(20000, 20000 + BLOCK)), "block_size": BLOCK, "lora_id": None, "lora_name": None,
        }]
    })  # fmt: skip
    index: dict[int, set[str]] = {}

    def read() -> None:
        for event in json.loads(told)["events"]:
            for each in event["block_hashes"]:
                index.setdefault(each, set()).add("replica")

    return {
        "metrics_page_s": _least(metrics.page, 20),
        "told_block_s": _least(tell, 200),
        "read_block_s": _least(read, 200),
    }


def _least(call: Callable[[], Any], times: int, repeats: int = 20) -> float:
    """Seconds of a call, the least of some repeats: others use this machine, too."""
    least = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(times):
            call()
        least = min(least, (time.perf_counter() - begun) / times)
    return least

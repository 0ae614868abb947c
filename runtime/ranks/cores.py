"""Which cores each rank of an engine computes on: an equal share of those that the process may use, node after node."""

import os
from collections.abc import Collection
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def shared_cores(ranks: int, nodes: Path = NODES) -> list[set[int]]:
    """The cores of each rank; all have all where there are fewer than ranks, and none where the system does not say
    which there are. Ranks lie in one NUMA node each where these are as many, or a divisor."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [set()] * ranks
    allowed = os.sched_getaffinity(0)
    if len(allowed) < ranks:
        return [allowed] * ranks
    node = {core: number for number, cores in node_cores(nodes).items() for core in cores}
    ordered = sorted(allowed, key=lambda core: (node.get(core, 0), core))
    ends = [len(ordered) * rank // ranks for rank in range(ranks + 1)]
    return [{*ordered[start:end]} for start, end in pairwise(ends)]


def node_cores(nodes: Path) -> dict[int, set[int]]:
    """The cores of each NUMA node, as Linux tells them; nothing where it does not."""
    found = {}
    for file in nodes.glob("node[0-9]*/cpulist"):
        parts = [part.split("-") for part in file.read_text().strip().split(",") if part]
        found[int(file.parent.name.removeprefix("node"))] = {
            core for first, *last in parts for core in range(int(first), int(last[0] if last else first) + 1)
        }
    return found


def stay_on(cores: Collection[int]) -> None:
    """Have the calling thread, and those that it starts from now on, run on these cores alone, if there are any."""
    if cores:
        with suppress(OSError):  # taken from this process since
            os.sched_setaffinity(0, cores)

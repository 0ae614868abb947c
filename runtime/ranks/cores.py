"""Which cores each rank of an engine computes on: an equal share of those that the process may use, node after node.

The first rank is a part of the process that loads the engine, whose threads are left where they are: the system moves
them to what the others leave.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def shared_cores(ranks: int, system: Path = SYSTEM) -> list[set[int]]:
    """The processors of each rank. Processors of one core stay together where there are cores enough, and cores of one
    NUMA node lie behind each other, so that two ranks have a node each of two equal ones. All ranks have all where
    there are fewer than ranks, and none where the system does not say which there are.

    system: where Linux tells of them.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return [set()] * ranks
    allowed = os.sched_getaffinity(0)
    if len(allowed) < ranks:
        return [allowed] * ranks
    node = {cpu: number for number, cpus in _node_processors(system) for cpu in cpus}
    place = {cpu: (node.get(cpu, 0), _first_of_core(cpu, system)) for cpu in allowed}
    ordered = sorted(allowed, key=lambda cpu: (place[cpu], cpu))
    cores = [{*cpus} for _, cpus in groupby(ordered, key=place.__getitem__)]
    units = cores if len(cores) >= ranks else [{cpu} for cpu in ordered]
    ends = [len(units) * rank // ranks for rank in range(ranks + 1)]
    return [set().union(*units[start:end]) for start, end in pairwise(ends)]


def _node_processors(system: Path) -> Iterator[tuple[int, set[int]]]:
    """The processors of each NUMA node, by its number; nothing where the system has none."""
    for file in system.glob("node/node[0-9]*/cpulist"):
        yield int(file.parent.name.removeprefix("node")), listed(file.read_text())


def _first_of_core(cpu: int, system: Path) -> int:
    """The first processor of the core that one belongs to; itself where the system does not say it."""
    with suppress(OSError, ValueError):
        return min(listed((system / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()))
    return cpu


def listed(text: str) -> set[int]:
    """The numbers of a list as Linux writes them: 0-3,8."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


def stay_on(cores: Collection[int]) -> None:
    """Have the calling thread, and those that it starts from now on, run on these processors alone, if any are
    given."""
    if cores:
        with suppress(OSError):  # taken from this process since
            os.sched_setaffinity(0, cores)

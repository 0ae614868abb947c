"""What ran where: a result says it, so that somebody else can read it."""

import os
import platform
import statistics
import time
from importlib.metadata import version
from typing import Any

import torch
from specstep.processor import cpu_instructions, processor_name

from .engines import Contender, Skip
from .families import family

SAID = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "asimd", "i8mm", "bf16", "sve")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system, without a name of the machine."""
    flags = cpu_instructions()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "instructions": [name for name in SAID if name in flags],
        "memory_gb": round(pages / 1e9, 1),
        "system": platform.system(),
        "load_at_start": [round(load, 1) for load in os.getloadavg()],
    }


def versions(contenders: list[Contender]) -> dict[str, str]:
    """Of Python, torch, and of every family that is installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": version("numpy")}
    for name in {contender.family for contender in contenders}:
        try:
            found[name] = family(name).version()
        except Skip:
            continue
    return found


class MemoryReads:
    """Reads of 512 MB by all threads together, each timed: sums of floats, which are read faster than integers are."""

    def __init__(self) -> None:
        self._data, self._seconds = torch.ones(2**27), list[float]()

    def read(self) -> None:
        """Once more."""
        start = time.perf_counter()
        self._data.sum()
        self._seconds.append(time.perf_counter() - start)

    def bandwidth(self) -> float:
        """Bytes per second, the median of the reads since it was last asked."""
        seconds, self._seconds = self._seconds, []
        return self._data.nbytes / statistics.median(seconds)

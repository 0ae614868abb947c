"""What ran where: a result says it, so that somebody else can read it."""

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from specstep.runtime.inductor.aoti import cpu_instructions

from .engines import Contender, Skip
from .families import family

SAID = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "asimd", "i8mm", "bf16", "sve")


def machine() -> dict[str, Any]:
    """Processor, cores, memory and system, without a name of the machine."""
    flags = cpu_instructions()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
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


def read_bandwidth(repeats: int = 15) -> float:
    """Bytes per second at which all threads together read memory: the best of several passes over 512 MB."""
    data = torch.ones(2**26, dtype=torch.int64)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.numel() * 8 / min(times)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())

"""Which GPU an engine runs on, and whether its memory is enough: nothing here knows a tensor library."""

import math
import re
from pathlib import Path

from ..errors import EngineError, InputError
from .engine_file import REBUILD, Manifest

GIGABYTE = 1e9


def gpu_number(device: str | None) -> int | None:
    """The N of "cuda:N"; None, for the current GPU, where nothing or "cuda" was asked for. Raises InputError."""
    if device in (None, "cuda"):
        return None
    found = re.fullmatch(r"cuda:(\d+)", device or "")
    if found is None:
        raise InputError(f"device: expected cuda or one GPU as cuda:1, got {device!r}")
    return int(found[1])


def available_memory() -> float:
    """Bytes of the machine's memory that may be taken; without a bound where the system does not say."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", path.read_text()) if path.is_file() else None
    return int(found[1]) * 1024 if found else math.inf


def refuse_gpu(gpu: int | None) -> None:
    """Raise InputError if a GPU was asked for: for engines that take none."""
    if gpu is not None:
        raise InputError(
            f"device: expected none for this engine, got cuda:{gpu}; CPU engines use no GPU, and those of TensorRT the "
            "first one that CUDA_VISIBLE_DEVICES names"
        )


def plan_memory(manifest: Manifest, free: int, gpu: str, rank: int = 0) -> str:
    """What a rank of an engine will take of a GPU's memory, of which so many bytes are free -> a line that says so.
    Activations and CUDA's own come on top. Raises EngineError where that is more than there is."""
    spec = manifest.spec
    parts = {
        "weights": int(manifest.files[spec.weights_files[rank]]["bytes"]),
        "caches": sum(tensor.nbytes for tensor in spec.caches),
        "state": sum(tensor.nbytes for tensor in (*spec.state, *spec.shared)),
    }
    said = ", ".join(f"{name} {size / GIGABYTE:.2f}" for name, size in parts.items())
    needed = sum(parts.values())
    if needed > free:
        raise EngineError(
            f"memory: expected {needed / GIGABYTE:.2f} GB free on {gpu} ({said}), got {free / GIGABYTE:.2f}; free "
            f"some, or {REBUILD} and a smaller --max-batch or --max-seq-len"
        )
    return f"takes {needed / GIGABYTE:.2f} of {free / GIGABYTE:.2f} GB that are free on {gpu}: {said}"

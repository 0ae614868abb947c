"""This machine's processor, as the kernel names it; little is known where there is no /proc/cpuinfo."""

import functools
import platform
from pathlib import Path


def processor_name() -> str:
    """The model, else the architecture."""
    return _field("model name") or platform.processor() or platform.machine()


def cpu_instructions() -> list[str]:
    """Flags of its instruction sets; empty where the kernel does not say."""
    return (_field("flags") or _field("Features")).split()


def is_intel() -> bool:
    """Whether Intel made it."""
    return _field("vendor_id") == "GenuineIntel"


@functools.cache
def _field(name: str) -> str:
    """A field of the first processor, empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name) and ":" in line), "")

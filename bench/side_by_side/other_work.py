"""How busy other processes keep the cores while an engine answers: what makes numbers of a shared machine readable."""

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
IDLE = (3, 4)  # places of idle and of waiting for input among the numbers of /proc/stat
GUEST = 8  # from here on time that was counted before


class OtherWork:
    """A stretch of time of one engine's process, from its making to `cores`."""

    def __init__(self, pid: int):
        self._pid = pid
        self._start, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s(pid)

    def cores(self) -> float:
        """Cores that anything but the process and its children has used since, on average; 0 where nobody says."""
        seconds = time.perf_counter() - self._start
        others = _busy_s() - self._busy - (_own_s(self._pid) - self._own)
        return max(0.0, others / max(seconds, 1e-9))


def _busy_s() -> float:
    """Seconds that all cores together were busy, or taken by another guest of the same host."""
    file = PROC / "stat"
    if not file.is_file():
        return 0.0
    numbers = [int(number) for number in file.read_text().splitlines()[0].split()[1:]][:GUEST]
    return sum(number for place, number in enumerate(numbers) if place not in IDLE) / TICKS


def _own_s(pid: int) -> float:
    """Seconds of a process and of its children."""
    try:
        numbers = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it is gone
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / TICKS + sum(_own_s(int(child)) for child in children)

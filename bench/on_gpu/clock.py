"""Time on a device and on the host: copies of memory, steps, and what of a step is the device's own work."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}  # bytes of one copy, more than caches hold
COPIES = REPEATS = 10
AHEAD_CYCLES = 2_000_000  # of a GPU, about a millisecond: longer than the launch of a graph of a thousand kernels


def machine(device: str) -> dict[str, Any]:
    """What ran where, for the JSON."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class Deadline:
    """Seconds after which nothing new is begun."""

    def __init__(self, seconds: float):
        self._end, self.seconds, self.refused = time.monotonic() + seconds, seconds, False

    def passed(self) -> bool:
        """Whether it is over; `refused` says from then on that somebody was told so."""
        self.refused |= time.monotonic() > self._end
        return self.refused


def wait(device: str) -> None:
    """Let the device finish."""
    if device == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a copy within the device's memory: the fastest of a few."""
    source = torch.ones(COPIED[device] // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = min(seconds_of(lambda: target.copy_(source), device) for _ in range(COPIES))
    return 2 * source.nbytes / seconds


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Seconds that a call keeps the device busy; on a CPU, those of the call."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)  # what is launched meanwhile runs without a gap
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def replayed_s(run: Callable[[], object], device: str) -> float:
    """The median seconds of a call's work on the device, on a GPU as a CUDA graph, as a step replays it: launched one
    by one, small kernels would measure Python."""
    run()  # compiles, allocates
    again: Callable[[], object] = run
    if device == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            run()  # a library's workspace belongs to a stream
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        again = graph.replay
    return statistics.median(seconds_of(again, device) for _ in range(REPEATS))


def wall_s(run: Callable[[], object]) -> float:
    """Seconds of a call that waits for what it starts, as a step does for its report."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextlib.contextmanager
def programs_timed(session: Any) -> Iterator[list[float]]:
    """Seconds of the device for each step of a session, as they are made: of its CUDA graph, from its first kernel to
    its last; on a CPU, of its program."""
    taken: list[float] = []
    if session.spec.device == "cpu":
        own = session.step_program

        def program(inputs: Any) -> Any:
            start = time.perf_counter()
            outputs = own(inputs)
            taken.append(time.perf_counter() - start)
            return outputs

        session.step_program = program
        try:
            yield taken
        finally:
            session.step_program = own
        return
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        taken.append(seconds_of(lambda: replay(graph), "cuda"))

    torch.cuda.CUDAGraph.replay = timed
    try:
        yield taken
    finally:
        torch.cuda.CUDAGraph.replay = replay


def median_ms(seconds: list[float]) -> float:
    """The median as milliseconds."""
    return statistics.median(seconds) * 1e3

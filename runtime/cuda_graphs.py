"""Steps as CUDA graphs, whatever records them: PyTorch's or the driver's."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

LOGGER = logging.getLogger(__name__)
Result = TypeVar("Result")


class CudaGraphs(Generic[Result]):
    """The steps of one session as CUDA graphs."""

    def __init__(
        self,
        capture: Callable[[Callable[[], Result]], Callable[[], Result]],
        refusals: tuple[type[Exception], ...],
    ):
        """capture: record what a call does, which runs nothing -> what replays it. refusals: what it raises where that
        cannot be a graph."""
        self._capture, self._refusals = capture, refusals
        self._failed = False  # whether a capture has

    def of(self, run: Callable[[], Result]) -> Callable[[], Result]:
        """`run` as a CUDA graph. It must work on static buffers alone; what it returns is overwritten by the next
        replay of any graph.

        The first call is a real one outside of any graph, so that everything lazy (allocations, module loads) has
        happened; the capture that follows it records and does not run, so no step is taken twice. Where one cannot be
        captured, a warning says so, once, and steps run as they are.
        """
        replay: Callable[[], Result] | None = None

        def call() -> Result:
            nonlocal replay
            if replay is not None:
                return replay()
            first = run()
            if not self._failed:
                try:
                    replay = self._capture(run)
                except self._refusals as error:
                    self._failed = True
                    LOGGER.warning("steps run without CUDA graphs, and slower: a capture failed: %s", error)
            return first

        return call

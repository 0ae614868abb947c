"""Where the time of a build goes."""

import time

from ..progress import OnProgress

# As the messages of a build begin.
BUILD_STAGES = ("loading", "comparing", "tracing", "compiling", "packing", "translating", "writing")
# What is usually left, by the stage that begins, as a multiple of what went before. Most of a build's time is Python's
# and depends on the machine alone.
LEFT = {"tracing": 8.0, "compiling": 1.4}
LEAST_LEFT = 5.0  # seconds


class StageTimes:
    """Passes messages on. Each that begins with a word of STAGES begins a stage, which lasts until the next one; the
    long ones say how much time is left, about. seconds: of each stage so far; the time ahead of the first is the
    first's."""

    def __init__(self, progress: OnProgress):
        self._report, self._stage = progress, BUILD_STAGES[0]
        self._started = self._since = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def __call__(self, message: str) -> None:
        """Pass a message on."""
        stage = message.partition(" ")[0]
        left = 0.0
        if stage in BUILD_STAGES:
            begins = stage != self._stage
            self.end(stage)
            left = LEFT.get(stage, 0.0) * begins * (self._since - self._started)
        self._report(f"{message}, about {left:.0f} s left" if left >= LEAST_LEFT else message)

    def end(self, following: str = BUILD_STAGES[-1]) -> dict[str, float]:
        """Close the stage -> `seconds`."""
        now = time.perf_counter()
        spent = self.seconds.get(self._stage, 0.0) + now - self._since
        self.seconds[self._stage] = round(spent, 2)
        self._stage, self._since = following, now
        return self.seconds

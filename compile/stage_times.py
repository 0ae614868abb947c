"""Where the time of a build goes."""

import time

from ..progress import OnProgress

STAGES = ("loading", "comparing", "tracing", "compiling", "translating", "writing")  # as messages of a build begin


class StageTimes:
    """Passes messages on. Each that begins with a word of STAGES begins a stage, which lasts until the next one.
    seconds: of each stage so far; the time ahead of the first is the first's."""

    def __init__(self, report: OnProgress):
        self._report, self._stage, self._since = report, STAGES[0], time.perf_counter()
        self.seconds: dict[str, float] = {}

    def __call__(self, message: str) -> None:
        """Pass a message on."""
        stage = message.partition(" ")[0]
        if stage in STAGES:
            self.end(stage)
        self._report(message)

    def end(self, following: str = STAGES[-1]) -> dict[str, float]:
        """Close the stage -> `seconds`."""
        now = time.perf_counter()
        spent = self.seconds.get(self._stage, 0.0) + now - self._since
        self.seconds[self._stage] = round(spent, 2)
        self._stage, self._since = following, now
        return self.seconds

"""How collecting speaks while it works."""

import time

from ...progress import OnProgress
from ..data.writer import DataWriter

REPORT_EVERY = 2.0  # seconds


class CollectProgress:
    """A line now and then about how far it is."""

    def __init__(self, writer: DataWriter, progress: OnProgress):
        self.writer, self.tell = writer, progress
        self._generated, self._since = 0, time.monotonic()

    def tick(self, tokens: int) -> None:
        """tokens: generated since the last call."""
        self._generated += tokens
        passed = time.monotonic() - self._since
        if passed > REPORT_EVERY:
            speed = f"; generating {self._generated / passed:.0f} tokens/s" if self._generated else ""
            self.tell(f"{self.writer.tokens:,} tokens collected{speed}")
            self._generated, self._since = 0, time.monotonic()

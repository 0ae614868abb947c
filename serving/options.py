"""What a server may be told, checked."""

from dataclasses import dataclass

from ..errors import InputError

LONGEST_INTERVAL_MS = 1000


@dataclass(frozen=True)
class ServeOptions:
    """api_keys: any of them opens the API; none: it is open. max_queue: choices of answers that may wait for a row, for
    each model. most_bytes: of a request's body. body_seconds: in which it has to arrive. log_prompts: write what was
    asked to the log. share_prefixes: a call may start from what was kept of another key's, and be drafted from what its
    answers taught; how long it takes tells of both. stream_interval_ms: least milliseconds from one chunk of a stream
    to the next, unless a choice ends; what comes between them goes out as one. hosts: names that the header Host may
    have, none: any. An open server for one machine names them: otherwise a web page could have its own name stand for
    this machine, and read what the browser gets here.

    Raises InputError for a key that no header can hold, and for numbers out of range.
    """

    api_keys: tuple[str, ...] = ()
    max_queue: int = 128
    most_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    log_prompts: bool = False
    share_prefixes: bool = False
    stream_interval_ms: int = 40
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("api-key: expected printable ASCII without spaces, got another text")
        if self.max_queue < 0:
            raise InputError(f"max-queue: expected an integer of at least 0, got {self.max_queue}")
        if not 0 <= self.stream_interval_ms <= LONGEST_INTERVAL_MS:
            most, got = LONGEST_INTERVAL_MS, self.stream_interval_ms
            raise InputError(f"stream-interval-ms: expected an integer from 0 to {most}, got {got}")

    @property
    def learning(self) -> bool:
        """Whether drafts may be made from earlier answers: those of one key alone, unless keys share."""
        return len(self.api_keys) < 2 or self.share_prefixes

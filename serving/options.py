"""What a server may be told, checked."""

from dataclasses import dataclass

from ..errors import InputError
from ..runtime.calls.formats import form_named

LONGEST_INTERVAL_MS = 1000


@dataclass(frozen=True)
class ServeOptions:
    """What a server is told. Raises InputError for a key that no header can hold, and for numbers out of range."""

    api_keys: tuple[str, ...] = ()  # any of them opens the API; none: it is open
    max_queue: int = 128  # choices of answers that may wait for a row, for each model
    most_bytes: int = 4 * 2**20  # of a request's body
    most_held: int = 256 * 2**20  # bytes of all bodies under way
    body_seconds: float = 30.0  # in which a body has to arrive
    head_seconds: float = 10.0  # in which the headers of a request have to
    send_seconds: float = 30.0  # in which a client has to read what was sent to it
    max_connections: int = 800  # of all clients
    log_prompts: bool = False  # write what was asked to the log
    # A call may start from what was kept of another key's, and be drafted from what its answers taught; how long it
    # takes tells of both.
    share_prefixes: bool = False
    # Least milliseconds from one chunk of a stream to the next, unless a choice ends; what comes between them goes out
    # as one.
    stream_interval_ms: int = 40
    # Names that the header Host may have, none: any. An open server for one machine names them: otherwise a web page
    # could have its own name stand for this machine, and read what the browser gets here.
    hosts: tuple[str, ...] = ()
    kv_events: bool = False  # tell readers of /kv_events which blocks of tokens the prefix caches keep
    tool_format: str | None = None  # in which all models write calls of tools; None: that of each engine

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InputError("api-key: expected printable ASCII without spaces, got another text")
        if self.max_queue < 0:
            raise InputError(f"max-queue: expected an integer of at least 0, got {self.max_queue}")
        if self.max_connections < 1:
            raise InputError(f"max-connections: expected an integer of at least 1, got {self.max_connections}")
        if self.kv_events and len(self.api_keys) > 1:
            got = len(self.api_keys)
            raise InputError(f"kv-events: expected one API key at most, for events have all prompts' tokens, got {got}")
        if self.tool_format is not None:
            form_named(self.tool_format)
        if not 0 <= self.stream_interval_ms <= LONGEST_INTERVAL_MS:
            most, got = LONGEST_INTERVAL_MS, self.stream_interval_ms
            raise InputError(f"stream-interval-ms: expected an integer from 0 to {most}, got {got}")

    @property
    def learning(self) -> bool:
        """Whether drafts may be made from earlier answers: those of one key alone, unless keys share."""
        return len(self.api_keys) < 2 or self.share_prefixes

"""What a user may choose when collecting."""

from dataclasses import dataclass

from ...errors import InputError

OWN_TOKENS = 1_000_000
OWN_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)


@dataclass(frozen=True)
class CollectOptions:
    """What a user may choose, validated. Raises InputError."""

    prompts: str | None = None  # a file of JSON lines, a prompt each
    # a file of JSON lines with a "text" each, over which prompts are made; without prompts and documents the model
    # asks itself
    documents: str | None = None
    # when to stop, what earlier runs collected included; None: all of the file, or OWN_TOKENS
    tokens: int | None = None
    hidden_states: bool = False  # whether the target's hidden states are kept, too
    # answers take them in turn, 0 is greedy; None: greedy where a file is given, else OWN_TEMPERATURES
    temperatures: tuple[float, ...] | None = None
    max_length: int = 1024  # most tokens of a sequence; longer dialogues are cut
    max_new_tokens: int = 384  # most tokens of an answer
    # a directory to answer greedily with; None: one is built in the data directory when it is first needed
    engine: str | None = None
    seed: int = 0
    # of the engine and of the target's own passes; None: bfloat16, for the passes float32 where that is quicker
    dtype: str | None = None
    device: str = "cpu"

    @property
    def asks_itself(self) -> bool:
        """Whether the model makes up its prompts from nothing."""
        return self.prompts is None and self.documents is None

    @property
    def most_tokens(self) -> int | None:
        """When to stop, None at the end of the file."""
        return self.tokens or (OWN_TOKENS if self.asks_itself else None)

    @property
    def answer_temperatures(self) -> tuple[float, ...]:
        """What answers take in turn."""
        return self.temperatures or (OWN_TEMPERATURES if self.asks_itself else (0.0,))

    def __post_init__(self) -> None:
        if self.prompts is not None and self.documents is not None:
            raise InputError("prompts and documents: expected one of them, got both; collect one after the other")
        for field, least in (("tokens", 1), ("max_length", 8), ("max_new_tokens", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise InputError(f"{field}: expected at least {least}, got {value}")
        for temperature in self.temperatures or ():
            if not 0 <= temperature <= 10:
                raise InputError(f"temperatures: expected 0 to 10, got {temperature}")

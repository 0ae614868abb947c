"""What a user may choose when training a drafter."""

from dataclasses import dataclass

from ...errors import InputError


@dataclass(frozen=True)
class TrainOptions:
    """What a user may choose, validated. Raises InputError.

    levels: of the training-time test, as deep as a tree will be; epochs: passes over the data; draft_vocab_size: most
    frequent tokens that the head can draft; intermediate_size: of its MLP, None for the target's; batch: rows of
    `width` tokens per update; held_out: share of the sequences that is measured on and never trained on; start: a head
    to go on from, whose sizes and draft vocabulary are kept, None for a new one; dtype: of the target, None for the
    quicker one of bfloat16 and float32.
    """

    levels: int = 5
    epochs: int = 3
    draft_vocab_size: int = 8192
    intermediate_size: int | None = None
    batch: int = 4
    width: int = 512
    learning_rate: float = 6e-3
    held_out: float = 0.01
    evaluations: int = 12
    start: str | None = None
    seed: int = 0
    dtype: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        ranges = {
            "levels": (1, 16), "epochs": (1, 1000), "draft_vocab_size": (8, 1 << 20), "batch": (1, 4096),
            "width": (8, 1 << 16), "evaluations": (1, 1000), "intermediate_size": (8, 1 << 20),
        }  # fmt: skip
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise InputError(f"{field}: expected {low} to {high}, got {value}")
        if self.width <= self.levels:
            raise InputError(f"width: expected more than the {self.levels} levels, got {self.width}")
        if not 0 < self.learning_rate < 1 or not 0 < self.held_out < 1:
            raise InputError(
                f"learning_rate and held_out: expected between 0 and 1, got {self.learning_rate}, {self.held_out}"
            )

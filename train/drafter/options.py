"""What a user may choose when training a drafter."""

from dataclasses import dataclass

from ...errors import InputError

KIND_NAMES = ("eagle3", "p-eagle", "block")


@dataclass(frozen=True)
class TrainOptions:
    """What a user may choose, validated. Raises InputError."""

    kind: str = "eagle3"  # one of `KIND_NAMES`
    levels: int = 5  # that it is trained on: as deep as a tree will be
    epochs: int = 3  # passes over the data
    draft_vocab_size: int = 8192  # the most frequent tokens, which the drafter can say
    layers: int | None = None  # decoder layers of a P-EAGLE head or a block drafter; None: 1
    intermediate_size: int | None = None  # of its MLP; None: the target's
    markov_rank: int | None = None  # of a block drafter's table of bigrams, 0 for none; None: 64
    batch: int = 4  # rows of `width` tokens in an update
    width: int = 512  # tokens of a row
    learning_rate: float = 6e-3
    held_out: float = 0.01  # share of the sequences that is measured on and never trained on
    evaluations: int = 12  # how often a run measures
    start: str | None = None  # a head to go on from, whose sizes and draft vocabulary are kept; None: a new one
    seed: int = 0
    dtype: str | None = None  # of the target; None: the quicker one of bfloat16 and float32
    device: str = "cpu"

    def __post_init__(self) -> None:
        ranges = {
            "levels": (1, 16), "layers": (1, 16), "markov_rank": (0, 1 << 14), "epochs": (1, 1000),
            "draft_vocab_size": (8, 1 << 20), "batch": (1, 4096), "width": (8, 1 << 16),
            "evaluations": (1, 1000), "intermediate_size": (8, 1 << 20),
        }  # fmt: skip
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise InputError(f"{field}: expected {low} to {high}, got {value}")
        if self.kind not in KIND_NAMES:
            raise InputError(f"kind: expected one of {', '.join(KIND_NAMES)}, got {self.kind}")
        without_effect = {
            "layers": self.kind == "eagle3" or (self.start and self.kind == "block"),
            "markov_rank": self.kind != "block" or self.start,
            "intermediate_size": self.start,
        }
        for field, idle in without_effect.items():
            if idle and (got := getattr(self, field)) is not None:
                beside = f"kind {self.kind}" + (" and a start, whose sizes stay" if self.start else "")
                raise InputError(f"{field}: expected none with {beside}, got {got}")
        if self.width <= self.levels:
            raise InputError(f"width: expected more than the {self.levels} levels, got {self.width}")
        if not 0 < self.learning_rate < 1 or not 0 < self.held_out < 1:
            raise InputError(
                f"learning_rate and held_out: expected between 0 and 1, got {self.learning_rate}, {self.held_out}"
            )

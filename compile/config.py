"""What a user may choose when building an engine."""

from dataclasses import dataclass

from ..runtime.errors import BuildError

DTYPES = ("bfloat16", "float32", "float16")
DEVICES = ("cpu", "cuda")
BACKENDS = ("inductor",)
TREES = ("chain", "static", "dynamic")


@dataclass(frozen=True)
class EngineConfig:
    """Build options, validated. `nodes` counts drafted tokens, the root not included; None picks the drafter's default.

    drafter: "none"; "ngram" (the row's own history); "default" (ngram, with the package's count tables where it has
    them for the model); or a path to count tables, a smaller causal LM or an EAGLE-3 head. tree: "chain"; "dynamic"
    with `depth` levels of `top_k`; "static" with the paths in the JSON file `tree_choices`, or with likely ones.
    max_seq_len: most tokens of a row, prompt included. prefill_chunk: most prompt tokens per prefill call.
    """

    drafter: str = "default"
    nodes: int | None = None
    tree: str | None = None
    depth: int | None = None
    top_k: int | None = None
    tree_choices: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    backend: str = "inductor"
    max_batch: int = 1
    max_seq_len: int = 2048
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        for field, known in (("dtype", DTYPES), ("device", DEVICES), ("backend", BACKENDS), ("tree", (*TREES, None))):
            if getattr(self, field) not in known:
                names = ", ".join(name for name in known if name)
                raise BuildError(f"{field}: expected one of {names}, got {getattr(self, field)!r}")
        ranges = {
            "nodes": (0, 256), "depth": (0, 64), "top_k": (1, 64), "max_batch": (1, 256), "prefill_chunk": (2, 8192)
        }  # fmt: skip
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise BuildError(f"{field}: expected {low} to {high}, got {value}")
        if not self.max_seq_len >= 4:
            raise BuildError(f"max_seq_len: expected at least 4, got {self.max_seq_len}")

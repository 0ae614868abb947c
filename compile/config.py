"""What a user may choose when building an engine."""

import re
from dataclasses import dataclass

from ..runtime.errors import BuildError

DTYPES = ("bfloat16", "float32", "float16")
DEVICES = ("cpu", "cuda")
BACKENDS = ("inductor", "onnx", "tensorrt", "tensorrt-rtx")
DEFAULT_DTYPES = {"onnx": "float32"}  # of backends that do not take the default bfloat16
TREES = ("chain", "static", "dynamic")


@dataclass(frozen=True)
class EngineConfig:
    """Build options, validated. `nodes` counts drafted tokens, the root not included; None picks the drafter's default.

    drafter: "none"; "ngram" (the row's own history); "default" (the count tables and the head that the package has for
    the model, else ngram); a path to count tables, a smaller causal LM or an EAGLE-3 head; or several of these with
    commas, mixed at every node. tree: "chain"; "dynamic"
    with `depth` levels of `top_k`; "static" with the paths in the JSON file `tree_choices`, or with likely ones.
    dtype: float32 is the default of the backend onnx.
    max_seq_len: most tokens of a row, prompt included. prefill_chunk: most prompt tokens per prefill call.
    compute_capability: GPUs that tensorrt-rtx builds for, as ("8.9", "12.0"); None is the GPU at hand. plugins: whether
    TensorRT runs our ops as plugins (our kernels) or builds them from its own layers.
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
    compute_capability: tuple[str, ...] | None = None
    plugins: bool = True

    def __post_init__(self) -> None:
        for field, known in (("dtype", DTYPES), ("device", DEVICES), ("backend", BACKENDS), ("tree", (*TREES, None))):
            if getattr(self, field) not in known:
                names = ", ".join(name for name in known if name)
                raise BuildError(f"{field}: expected one of {names}, got {getattr(self, field)!r}")
        if self.backend == "onnx" and self.dtype == "bfloat16":
            raise BuildError(
                "dtype: expected float32 or float16 for backend onnx, got bfloat16: ONNX Runtime has no bfloat16 "
                "matrix product on a CPU"
            )
        if self.backend == "onnx" and self.device != "cpu":
            raise BuildError(f"device: expected cpu for backend onnx, got {self.device}")
        self._check_tensorrt()
        ranges = {
            "nodes": (0, 256), "depth": (0, 64), "top_k": (1, 64), "max_batch": (1, 256), "prefill_chunk": (2, 8192)
        }  # fmt: skip
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise BuildError(f"{field}: expected {low} to {high}, got {value}")
        if not self.max_seq_len >= 4:
            raise BuildError(f"max_seq_len: expected at least 4, got {self.max_seq_len}")

    def _check_tensorrt(self) -> None:
        """The options of the TensorRT backends. Raises BuildError."""
        if self.compute_capability is not None:
            if self.backend != "tensorrt-rtx":
                raise BuildError(
                    f"compute_capability: expected none for backend {self.backend}, got "
                    f"{' '.join(self.compute_capability)}; only --backend tensorrt-rtx builds for another GPU"
                )
            odd = [name for name in self.compute_capability if not re.fullmatch(r"\d{1,2}\.\d", name)]
            if odd or not self.compute_capability:
                raise BuildError(f"compute_capability: expected numbers as 8.9, got {' '.join(odd) or 'none'}")
        if not self.plugins and not self.backend.startswith("tensorrt"):
            raise BuildError(f"plugins: expected backend tensorrt or tensorrt-rtx for --no-plugins, got {self.backend}")
        if self.backend.startswith("tensorrt") and self.device != "cpu":
            raise BuildError(
                f"device: expected cpu (where the model is traced) for backend {self.backend}, got {self.device}"
            )

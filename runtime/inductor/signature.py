"""The signature of a compiled program: dtype and shape of what it takes and returns. It lies in the program's package.

A program is native code that trusts its tensors, so those of the manifest and of the weights file are compared with it
before it runs.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...errors import EngineError
from ..engine_file import NEXT, REBUILD, EngineSpec, ProgramSpec

KEY = "specstep"  # in the package's metadata


class TensorKind(NamedTuple):
    """What a tensor is: its dtype, named as in torch, and its sizes, None where any will do."""

    dtype: str
    shape: Sequence[int | None]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorKind":
        """That of a tensor; of a traced one, sizes that vary are None."""
        sizes = [size if isinstance(size, int) else None for size in tensor.shape]
        return cls(str(tensor.dtype).removeprefix("torch."), sizes)

    def takes(self, other: "TensorKind") -> bool:
        """Whether a tensor of another kind, whose sizes are known, is one of this kind."""
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and all(size in (None, got) for size, got in zip(self.shape, other.shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join('any' if size is None else str(size) for size in self.shape)}]"


class Signature(NamedTuple):
    """Inputs and outputs of a program in order, and its constants by its names of them."""

    inputs: list[TensorKind]
    outputs: list[TensorKind]
    constants: dict[str, TensorKind]

    def metadata(self) -> dict[str, str]:
        """The signature as metadata of a package."""
        return {KEY: json.dumps(self)}

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "Signature":
        """The signature in a package's metadata. Raises KeyError where there is none."""
        inputs, outputs, constants = json.loads(metadata[KEY])
        named = {name: TensorKind(*kind) for name, kind in constants.items()}
        return cls([TensorKind(*kind) for kind in inputs], [TensorKind(*kind) for kind in outputs], named)


def check_tensors(path: Path, signature: Signature, spec: EngineSpec, program: ProgramSpec) -> None:
    """Compare the program at `path` with the manifest. Raises EngineError."""
    given = _given(spec, program)
    for side, names, kinds in (
        ("inputs", program.inputs, signature.inputs),
        ("outputs", program.outputs, signature.outputs),
    ):
        if len(names) != len(kinds):
            raise EngineError(
                f"{path}: {side}: expected {len(kinds)}, got {len(names)} in the manifest; copy it again or {REBUILD}"
            )
        named = ((name.removeprefix(NEXT), kind) for name, kind in zip(names, kinds, strict=True))
        _compare(path, side, ((name, kind, given.get(name, kind)) for name, kind in named))


def check_weights(path: Path, signature: Signature, program: ProgramSpec, weights: Mapping[str, Tensor]) -> None:
    """Compare the weights file at `path` with what a program is lent of it. Raises EngineError."""
    expected = ((stored, signature.constants[name]) for name, stored in program.constants.items())
    _compare(path, "weights", ((n, kind, TensorKind.of(weights[n]) if n in weights else None) for n, kind in expected))


def _compare(path: Path, side: str, kinds: Iterable[tuple[str, TensorKind, TensorKind | None]]) -> None:
    """kinds: names, what the program expects, and what there is."""
    for name, expected, got in kinds:
        if got is None or not expected.takes(got):
            raise EngineError(
                f"{path}: {side}: {name!r:.80}: expected {expected}, as the program was compiled for, got "
                f"{got or 'none'}; copy it again or {REBUILD}"
            )


def _given(spec: EngineSpec, program: ProgramSpec) -> dict[str, TensorKind]:
    """What a session gives a program: each tensor with as many rows as it may have."""
    rows = 1 if program is spec.prefill else spec.max_batch
    sizes = {"tokens": (1, spec.prefill_chunk), "count": (1,), "nodes": (1 + spec.nodes,), "catch_up": (spec.catch_up,)}
    given = {name: TensorKind("int64", shape) for name, shape in sizes.items()}
    given |= {tensor.name: TensorKind(tensor.dtype, tensor.shape) for tensor in spec.shared}
    return given | {t.name: TensorKind(t.dtype, (rows, *t.shape[1:])) for t in (*spec.state, *spec.caches)}

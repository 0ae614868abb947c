"""What a TensorRT plugin of ours is, whichever library runs it: one kernel launch as a node of the network.

Each op describes its launches in its `plugin.py`, and `plugins.py` lists them. `runtime/tensorrt/plugins.py` registers
them with TensorRT for RTX, `compile/tensorrt/plugins.py` with TensorRT. No tensor library is imported here: an engine's
runtime needs none.

A dimension is an int at run time, and while a network is built an expression of the library with +, -, * and //
whose left operand must be an expression too.
"""

import builtins
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from .case import Case

NAMESPACE, VERSION = "specstep", "1"
FLOAT = "float"  # the network's own floating type, one for all tensors of a node that carry this name
TRITON_TYPES = {"int64": "i64", "int32": "i32", "bool": "i1", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DYNAMIC = -1  # a dimension that is not known when the kernel is compiled

Dim = Any
Shapes = Mapping[str, Sequence[Dim]]
Attributes = Mapping[str, Any]

INTEGERS = SimpleNamespace(constant=int, max=builtins.max, min=builtins.min)


class Plugin(ABC):
    """One kernel launch. The kernel's arguments are the inputs, int32 scalars, the outputs, then constants.

    inputs, outputs: name of each tensor -> its dtype ("float" is FLOAT), the names and the order of the kernel's
    arguments. attributes: name -> type. aliases: output index -> index of the input whose memory it is.
    """

    name: ClassVar[str]
    inputs: ClassVar[dict[str, str]]
    outputs: ClassVar[dict[str, str]]
    attributes: ClassVar[dict[str, type]] = {}
    aliases: ClassVar[dict[int, int]] = {}

    @abstractmethod
    def output_shapes(self, shapes: Shapes, attributes: Attributes, dims: Any) -> list[Sequence[Dim]]:
        """Shape of each output from the inputs' by name. `dims` has `constant`, `max` and `min` for dimensions."""

    @abstractmethod
    def scalars(self, shapes: Shapes) -> list[Dim]:
        """The kernel's int32 arguments, from the shapes of inputs and outputs."""

    @abstractmethod
    def grid(self, shapes: Shapes, constants: Mapping[str, int]) -> tuple[Dim, Dim, Dim]:
        """Programs to launch, from all shapes and the integer constants of `case`."""

    @abstractmethod
    def case(self, dtype: str, shapes: Shapes, attributes: Attributes) -> Case:
        """What to compile: shapes as ints, DYNAMIC where unknown; dtype is that of FLOAT, "" where there is none."""

    def pointers(self, dtype: str) -> dict[str, str]:
        """Triton's type of each tensor argument; dtype is that of FLOAT."""
        tensors = self.inputs | self.outputs
        return {name: f"*{TRITON_TYPES[dtype if kind == FLOAT else kind]}" for name, kind in tensors.items()}

    def dtype(self, given: Sequence[str]) -> str:
        """The dtype that FLOAT stands for, from the inputs' dtypes; "" where there is none."""
        return next((got for got, kind in zip(given, self.inputs.values(), strict=True) if kind == FLOAT), "")

    def sized(self, inputs: Sequence[Sequence[int]], attributes: Attributes) -> dict[str, Sequence[int]]:
        """Sizes of the inputs in order -> those of all tensors by name."""
        return self.named([*inputs, *self.output_shapes(self.named(inputs), attributes, INTEGERS)])

    def accepts(self, position: int, dtypes: Sequence[str]) -> bool:
        """Whether tensor `position`, inputs first, may have its dtype, given those of the tensors before it."""
        kinds = [*self.inputs.values(), *self.outputs.values()]
        if kinds[position] != FLOAT:
            return dtypes[position] == kinds[position]
        first = kinds.index(FLOAT)
        return dtypes[position] in ("float32", "float16", "bfloat16") and dtypes[position] == dtypes[first]

    def named(self, shapes: Sequence[Sequence[Dim]]) -> dict[str, Sequence[Dim]]:
        """Shapes in order, of the inputs or of inputs and outputs, by name."""
        return dict(zip([*self.inputs, *self.outputs], shapes, strict=False))


def known(dim: int, field: str) -> int:
    """A dimension that must be known when the kernel is compiled. Raises ValueError."""
    if dim == DYNAMIC:
        raise ValueError(f"{field}: expected a size that is fixed at build, got a dynamic one")
    return dim


def launched(launch: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """What torch launches a kernel with, as `Case` has it: its constants, and the options of its compiler."""
    options = {name: value for name, value in launch.items() if not name.startswith("BLOCK_")}
    return {name: value for name, value in launch.items() if name not in options}, options


def power_of_2(count: int) -> int:
    """The smallest power of 2 that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def ceil_div(dim: Dim, divisor: int) -> Dim:
    """dim / divisor, rounded up."""
    return (dim + (divisor - 1)) // divisor

"""Less code is generated, in less time; PyTorch is as it was afterwards."""

import zipfile
from contextlib import suppress
from unittest.mock import patch

import pytest
import sympy
import torch
from specstep.compile.inductor.lean_code import (
    less_optimized,
    no_copies_of_weights,
    rules_made_once,
    strides_by_derivative,
)
from specstep.compile.inductor.settings import FEW_PAIRS, UNCHECKED, known
from torch._inductor import compile_fx, cpp_builder
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.codegen import cpp
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch.utils._sympy.functions import FloorDiv, ModularIndexing


def test_settings_that_this_pytorch_lacks_are_left_out():
    settings = UNCHECKED | FEW_PAIRS
    assert known(settings | {"nobody.knows": 1}) == known(settings) != {}


def test_generated_code_does_not_check_its_inputs(engine_folder):
    for name in ("prefill", "step"):
        with zipfile.ZipFile(engine_folder / f"{name}.pt2") as package:
            code = next(package.read(file).decode() for file in package.namelist() if file.endswith(".wrapper.cpp"))
        assert "::run_impl(" in code and "void check_input_" not in code


def test_rules_are_made_at_the_first_use(monkeypatch):
    made = []
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", lambda handler: made.append(handler))
    with rules_made_once():
        assert made == []
        for _ in range(3):
            DtypePropagationOpsHandler()
        assert len(made) == 1
    DtypePropagationOpsHandler()
    assert len(made) == 2


X, Y, SIZE = sympy.symbols("d0 d1 s0", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    "index",
    [
        sympy.Integer(7),
        X + 64 * Y,
        SIZE * X + (SIZE + 1) * 64 * Y + 3,
        SIZE * (X + 2 * Y) * (SIZE - 1),
        FloorDiv(X, 16) + 4 * Y,
        ModularIndexing(X, 1, 32) + X,
        X * X + Y,
        X * Y,
        sympy.Piecewise((X, X < 4), (Y, True)),
    ],
)
@pytest.mark.parametrize("length", [(), (16,)])
def test_strides_are_those_of_pytorch(index, length):
    expected = [cpp.stride_at_vec_range(index, variable, *length) for variable in (X, Y)]
    general = cpp.stride_at_vec_range
    with strides_by_derivative():
        assert cpp.stride_at_vec_range is not general
        got = [cpp.stride_at_vec_range(index, variable, *length) for variable in (X, Y)]
    assert cpp.stride_at_vec_range is general
    assert [sympy.expand(a - b) for a, b in zip(got, expected, strict=True)] == [0, 0]


def test_weights_are_not_copied(monkeypatch):
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    copied = []
    copy = compile_fx.clone_preserve_strides
    monkeypatch.setattr(compile_fx, "clone_preserve_strides", lambda tensor: copied.append(tensor) or copy(tensor))
    program = torch.export.export(Layer(), (torch.ones(3),))

    def copies() -> int:
        copied.clear()
        with patch.object(AotCodeCompiler, "compile", lambda *given, **named: []), suppress(Exception):
            torch._inductor.aot_compile(program.module(), (torch.ones(3),))
        return len(copied)

    assert copies() == 1
    with no_copies_of_weights():
        assert copies() == 0
    assert copies() == 1


def test_kernels_are_optimised_less():
    flags, of_wrappers = (cpp_builder._get_optimization_cflags("g++", wrapper) for wrapper in (False, True))
    with less_optimized():
        less = cpp_builder._get_optimization_cflags("g++")
        assert cpp_builder._get_optimization_cflags("g++", True) == of_wrappers
    assert flags == cpp_builder._get_optimization_cflags("g++") and "O3" in flags[0] and "O2" in less[0]
    assert [flag for flag in less[0] if flag != "O2"] == [flag for flag in flags[0] if flag != "O3"]

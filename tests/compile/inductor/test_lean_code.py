"""Less code is generated, in less time; PyTorch is as it was afterwards."""

import re
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
    sizes_computed_once,
    strides_by_derivative,
    writes_put_back,
)
from specstep.compile.inductor.settings import FEW_PAIRS, UNCHECKED, known
from torch._inductor import compile_fx, cpp_builder
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.codegen import cpp
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.pattern_matcher import Match
from torch.export import Dim
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
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


LIBRARY = torch.library.Library("specstep_test_lean", "DEF")
WRITING = {
    "one": "(Tensor(a!) x, Tensor y, int n) -> Tensor",
    "several": "(Tensor y, Tensor(a!)[] many, Tensor(b!)? other) -> (Tensor, Tensor)",
    "nothing": "(Tensor(a!) x, Tensor y) -> ()",
}


def ops():
    """Ops that write in place, returning one tensor, two, and none."""
    fakes = {
        "one": lambda x, y, n: torch.empty_like(y),
        "several": lambda y, many, other: (torch.empty_like(y), y.new_empty(2, 3)),
        "nothing": lambda x, y: None,
    }
    if not hasattr(torch.ops.specstep_test_lean, "one"):
        for name, schema in WRITING.items():
            LIBRARY.define(name + schema)
            torch.library.register_fake(f"specstep_test_lean::{name}", fakes[name], lib=LIBRARY)
    return torch.ops.specstep_test_lean


class Writing(torch.nn.Module):
    """Writes to its inputs, to one of them by a view, and to what it has made itself, which is read again."""

    def forward(self, caches: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third, fourth = caches
        made = x.sin()
        y = ops().one(first, x, 3) + 1
        z, small = ops().several(y, [second, third], None)
        ops().several(z, [], fourth)
        ops().nothing(made, z)
        ops().nothing(first[1:], z)
        kept = x * 2
        ops().nothing(kept[:1], y)
        return made + z, small, kept.cos(), y


def written_code(*less):
    """The code of Writing, but for comments and names of kernels, and what PyTorch ran for it."""
    made, ran = [], []

    def catch(graph, wrapper, kernels, *given, **named):
        made.append(wrapper + kernels)
        return []

    def count(kind, function):
        return lambda *given, **named: ran.append(kind) or function(*given, **named)

    rows = Dim("rows", min=3, max=64)
    caches = [torch.zeros(4, 8) for _ in range(4)]
    with torch.no_grad():
        shapes = ([{0: rows}] * 4, {0: rows})
        program = torch.export.export(Writing(), (caches, torch.ones(4, 8)), dynamic_shapes=shapes)
    traced = count("traced", Match.replace_by_example)
    with (
        torch._functorch.config.patch(custom_op_default_layout_constraint="needs_fixed_stride_order"),
        patch.object(AotCodeCompiler, "compile", catch),
        patch.object(
            FakeTensorProp,
            "propagate_dont_convert_inputs",
            count("sizes", FakeTensorProp.propagate_dont_convert_inputs),
        ),
        patch.object(Match, "replace_by_example", lambda *given, **named: traced(*given, **named)),
        suppress(IndexError),
    ):
        for each in less:
            each.__enter__()
        try:
            torch._inductor.aoti_compile_and_package(program, package_path="/nowhere.pt2")
        finally:
            for each in less:
                each.__exit__(None, None, None)
    (code,) = made
    code = re.sub(
        r"^ *(//.*|void\* cpp_fused\w*\{nullptr\};)$", "", code, flags=re.M
    )  # the latter in their names' order
    return re.sub(r"cpp_fused_\w*_(\d+)\b", r"kernel_\1", code), ran


def test_code_is_that_of_pytorch():
    code, ran = written_code()
    assert ran.count("sizes") == 1 and ran.count("traced") == 6
    less, ran = written_code(sizes_computed_once(), writes_put_back())
    assert less == code and ran.count("sizes") == 0
    assert 0 < ran.count("traced") < 6  # views are left to PyTorch

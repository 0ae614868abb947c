"""Programs are traced less often; what is compiled is the same to the letter."""

import re
from contextlib import ExitStack, suppress
from unittest.mock import patch

import pytest
import torch
from specstep.compile.inductor.lean_trace import (
    TRACED_LESS,
    _with_the_aliases_of,
    aliases_read_from_graph,
    sizes_computed_once,
    writes_put_back,
)
from torch._functorch import aot_autograd
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.pattern_matcher import Match
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

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


def exported(module):
    rows = Dim("rows", min=3, max=64)
    caches = [torch.zeros(4, 8) for _ in range(4)]
    with torch.no_grad():
        shapes = ([{0: rows}] * 4, {0: rows})
        return torch.export.export(module, (caches, torch.ones(4, 8)), dynamic_shapes=shapes)


def compiled(module, *less):
    """A module's code, but for comments and names of kernels, and what PyTorch ran for it."""
    made, ran = [], []

    def catch(graph, wrapper, kernels, *given, **named):
        made.append(wrapper + kernels)
        return []

    def counted(owner, name):
        function = getattr(owner, name)
        return patch.object(owner, name, lambda *given, **named: ran.append(name) or function(*given, **named))

    program = exported(module)
    with ExitStack() as held:
        held.enter_context(
            torch._functorch.config.patch(custom_op_default_layout_constraint="needs_fixed_stride_order")
        )
        held.enter_context(patch.object(AotCodeCompiler, "compile", catch))
        held.enter_context(counted(FakeTensorProp, "propagate_dont_convert_inputs"))
        held.enter_context(counted(Match, "replace_by_example"))
        held.enter_context(counted(PropagateUnbackedSymInts, "run"))
        for each in less:
            held.enter_context(each())
        with suppress(IndexError):  # there is no package
            torch._inductor.aoti_compile_and_package(program, package_path="/nowhere.pt2")
    code = re.sub(r"^ *(//.*|void\* cpp_fused\w*\{nullptr\};)$", "", made[0], flags=re.M)  # the latter sorted by name
    return re.sub(r"cpp_fused_\w*_(\d+)\b", r"kernel_\1", code), ran


SIZES, WRITES, RUNS = "propagate_dont_convert_inputs", "replace_by_example", "run"


def test_code_is_that_of_pytorch():
    code, ran = compiled(Writing())
    assert [ran.count(each) for each in (SIZES, WRITES, RUNS)] == [1, 6, 2]
    for less, expected in {
        sizes_computed_once: [0, 6, 2],
        writes_put_back: [1, 2, 2],  # views are left to PyTorch
        aliases_read_from_graph: [1, 6, 1],
    }.items():
        other, ran = compiled(Writing(), less)
        assert other == code
        assert [ran.count(each) for each in (SIZES, WRITES, RUNS)] == expected, less
    assert compiled(Writing(), *TRACED_LESS)[0] == code


class Returns(torch.nn.Module):
    """Returns what `which` names: something new, a view of it, an input, a part of one, or what was written to one."""

    def __init__(self, which: str):
        super().__init__()
        self.which = which

    def forward(self, caches: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        caches[0].add_(x)
        caches[1].copy_(x * 2)
        new = x.sin()
        return {
            "new": (new, new + caches[2]),
            "a view": (new, new[1:]),
            "an input": (new, x),
            "a part": (new, caches[2][1:]),
            "a part of another type": (new, x.view(torch.int32)),
            "what was written": (new, caches[0][:2]),
            "what an op returned": (new, torch.dropout(x, 0.5, False)),
            "twice": (new, new),
        }[self.which]


@pytest.mark.parametrize("which", ["new", "a view", "twice"])
def test_aliases_are_those_that_pytorch_finds(which):
    found = []
    collect = aot_autograd.run_functionalized_fw_and_collect_metadata

    def keep(function, **named):
        inner = collect(function, **named)
        return lambda *given: found.append(inner(*given)) or found[-1]

    with patch.object(aot_autograd, "run_functionalized_fw_and_collect_metadata", keep):
        compiled(Returns(which))
        compiled(Returns(which), aliases_read_from_graph)
    expected, got = found
    assert got == expected
    assert [info.mutates_data for info in got.input_info] == [True, True, False, False, False][: len(got.input_info)]


@pytest.mark.parametrize(
    "which", ["an input", "a part", "a part of another type", "what was written", "what an op returned"]
)
def test_a_result_that_may_be_part_of_an_input_is_left_to_pytorch(which):
    assert _with_the_aliases_of(exported(Returns(which)).module()) is None
    assert compiled(Returns(which), aliases_read_from_graph)[0] == compiled(Returns(which))[0]

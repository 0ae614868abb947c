"""Inputs of one Dim have one symbol from the start; the exported program is the same."""

import re

import pytest
import torch
from specstep.compile.sizes_named_once import sizes_named_once
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

ROWS, SLOTS = Dim("rows", max=8), 8 * Dim("steps", max=16)


class Sum(nn.Module):
    def forward(self, x: Tensor, *caches: Tensor) -> Tensor:
        for cache in caches:
            x = x + cache.sum(1)
        return x


def export(monkeypatch, named_once: bool):
    """The program, and how many symbols were made for it."""
    made, create = [], ShapeEnv.create_symbol
    monkeypatch.setattr(ShapeEnv, "create_symbol", lambda *given, **named: made.append(1) or create(*given, **named))
    shapes = ({0: ROWS}, *({0: ROWS, 1: SLOTS} for _ in range(6)))
    given = (torch.zeros(3, 4), *(torch.zeros(5, 32, 4)[:3, :16] for _ in range(6)))
    with sizes_named_once(shapes if named_once else ()):
        program = torch.export.export(Sum(), given, dynamic_shapes=(shapes[0], shapes[1:]), strict=False)
    monkeypatch.undo()
    sizes = {str(node.meta["val"].shape[0]) for node in program.graph.find_nodes(op="placeholder")}
    return program, len(made), sizes


def strides(program) -> list[str]:
    """Those of its inputs, the names of sizes left out."""
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    return [re.sub(r"s\d+", "s", str(value.stride())) for value in values]


def test_the_program_is_the_same(monkeypatch):
    once, few, sizes = export(monkeypatch, named_once=True)
    each, many, _ = export(monkeypatch, named_once=False)
    assert few < many and len(sizes) == 1
    assert [node.target for node in once.graph.nodes] == [node.target for node in each.graph.nodes]
    assert strides(once) == strides(each)
    assert sorted(map(str, once.range_constraints.values())) == sorted(map(str, each.range_constraints.values()))
    given = torch.ones(2, 4), *(torch.ones(2, 24, 4) for _ in range(6))
    assert torch.equal(once.module()(*given), each.module()(*given))
    assert float(once.module()(*given).sum()) == 2 * 4 * (1 + 6 * 24)


@pytest.mark.parametrize("wrong", [(3, 24), (2, 20)])
def test_sizes_that_differ_are_refused(monkeypatch, wrong):
    once, *_ = export(monkeypatch, named_once=True)
    given = torch.ones(2, 4), *(torch.ones(2, 24, 4) for _ in range(5)), torch.ones(*wrong, 4)
    with pytest.raises((AssertionError, RuntimeError)):
        once.module()(*given)

"""Rewrites of programs for a GPU, run in plain torch: they compute what they take the place of."""

import pytest
import torch
from specstep.compile.inductor.gpu_rewrites import MOST_COUNTED, count_ranks
from specstep.graphs.tree import top
from torch.export import Dim, export

TOPK = torch.ops.aten.topk.default


class Top(torch.nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, scores):
        return top(scores, self.k)


class Largest(torch.nn.Module):
    def forward(self, x):
        return x.topk(3, -1)


class AnyRanks(torch.fx.Interpreter):
    """As a compiler times kernels: what a program counts first is any number."""

    counted = False

    def call_function(self, target, args, kwargs):
        made = super().call_function(target, args, kwargs)
        if target != torch.ops.aten.sum.dim_IntList or self.counted:
            return made
        self.counted = True
        return torch.zeros_like(made)


class LargestIndices(torch.nn.Module):
    def forward(self, x):
        return x.topk(3, -1).indices


def calls(program, target):
    return program.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize(("count", "k"), [(1, 1), (4, 4), (68, 16), (410, 10), (MOST_COUNTED, 64)])
def test_ranks_that_are_counted_are_those_of_topk(count, k):
    program = export(Top(k), (torch.zeros(2, count),), dynamic_shapes=({0: Dim("rows", min=1, max=8)},))
    count_ranks(program)
    assert calls(program, TOPK) == []
    torch.manual_seed(count)
    for rows in (1, 3):
        scores = -torch.rand(rows, count) * 9
        scores[torch.rand(rows, count) < 0.3] = -2.0  # equal ones
        scores[torch.rand(rows, count) < 0.2] = float("-inf")
        assert torch.equal(program.module()(scores), top(scores, k))


def test_what_is_found_is_an_index_whatever_the_ranks_are():
    program = export(Top(4), (torch.zeros(2, 16),))
    count_ranks(program)
    timed = AnyRanks(program.graph_module)
    [found] = timed.run(torch.rand(2, 16))
    assert timed.counted and found.amin() >= 0 and found.amax() < 16


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (LargestIndices(), torch.zeros(2, MOST_COUNTED + 1, dtype=torch.int64)),
        (LargestIndices(), torch.zeros(2, 9)),  # floats: what is not a number has an order of its own
        (Largest(), torch.zeros(2, 9, dtype=torch.int64)),
    ],
)
def test_others_stay(module, x):
    program = export(module, (x,))
    count_ranks(program)
    assert len(calls(program, TOPK)) == 1

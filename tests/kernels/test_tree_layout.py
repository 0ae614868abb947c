"""Tree layout against a plain-Python walk."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.tree_layout.op import tree_layout as tree_layout_op
from torch import Tensor


def brute_force(parents: Tensor, valid: Tensor, chains: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    batch, count = parents.shape
    words = -(-count // 32)
    ancestors, depths = [], []
    for b in range(batch):
        paths = chains(parents[b].tolist(), valid[b].tolist())
        bits = [sum(1 << node for node in path) for path in paths]
        packed = [[(value >> 32 * w) & 0xFFFFFFFF for w in range(words)] for value in bits]
        ancestors.append([[w - 2**32 if w >= 2**31 else w for w in row] for row in packed])
        depths.append([len(path) - 1 for path in paths])
    return torch.tensor(ancestors, dtype=torch.int32), torch.tensor(depths)


def check(backend: Any, chains: Callable[..., Any], parents: Tensor, valid: Tensor) -> None:
    got = backend.op("tree_layout")(parents.to(backend.device), valid.to(backend.device))
    for name, expected, actual in zip(("ancestors", "depths"), brute_force(parents, valid, chains), got, strict=True):
        assert actual.dtype == expected.dtype, name
        wrong = (actual.cpu() != expected).nonzero()
        assert len(wrong) == 0, f"{name}: first wrong at {wrong[0].tolist()}"


@pytest.mark.parametrize("nodes", [1, 2, 8, 32, 33, 34, 65, 130])
def test_random_trees(backend: Any, random_trees: Any, chains: Any, nodes: int) -> None:
    check(backend, chains, *random_trees(6, nodes, nodes))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tree(backend: Any, chains: Any, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 12))
    parents = data.draw(st.lists(st.integers(-3, nodes + 2), min_size=nodes, max_size=nodes))
    valid = data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes))
    check(backend, chains, torch.tensor([[-1, *parents[1:]]]), torch.tensor([valid]))


def test_strided_inputs(backend: Any, random_trees: Any, chains: Any) -> None:
    parents, valid = random_trees(5, 9, 3)
    wide = torch.zeros(9, 5, dtype=torch.int64).copy_(parents.T)
    check(backend, chains, wide.T, valid)


@pytest.mark.parametrize("nodes", [1, 9, 33])
def test_opcheck(random_trees: Any, nodes: int) -> None:
    torch.library.opcheck(tree_layout_op, random_trees(5, nodes, 0))

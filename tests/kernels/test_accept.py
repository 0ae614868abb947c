"""Acceptance against a plain-Python walk down the tree."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.accept.op import accept as accept_op
from specstep.kernels.tree_layout.reference import tree_layout
from torch import Tensor


def brute_force(
    tokens: Tensor, parents: Tensor, valid: Tensor, choice: Tensor, max_depth: int, chains: Callable[..., Any]
) -> tuple[Tensor, Tensor]:
    batch, count = tokens.shape
    paths, lengths = [], []
    for b in range(batch):
        best = [0]
        for path in chains(parents[b].tolist(), valid[b].tolist()):
            agrees = all(tokens[b, j] == choice[b, i] for i, j in pairwise(path))
            if path[0] == 0 and agrees and len(best) < len(path) <= max_depth + 1:
                best = path
        paths.append(best + [min(d, count - 1) for d in range(len(best), max_depth + 1)])
        lengths.append(len(best) - 1)
    return torch.tensor(paths), torch.tensor(lengths)


def check(backend: Any, chains: Any, tokens: Tensor, parents: Tensor, valid: Tensor, choice: Tensor, depth: int) -> int:
    ancestors, depths = tree_layout(parents, valid)
    inputs = [x.to(backend.device) for x in (tokens, parents, valid, ancestors, depths, choice)]
    path, accepted = backend.op("accept")(*inputs, depth)
    expected_path, expected = brute_force(tokens, parents, valid, choice, depth, chains)
    assert accepted.dtype == path.dtype == torch.int64
    torch.testing.assert_close(accepted.cpu(), expected, rtol=0, atol=0)
    torch.testing.assert_close(path.cpu(), expected_path, rtol=0, atol=0)
    return int(expected.sum())


@pytest.mark.parametrize("nodes", [1, 2, 8, 34, 65, 130])
@pytest.mark.parametrize("vocabulary", [1, 3, 2**40])
def test_random_trees(backend: Any, random_trees: Any, chains: Any, nodes: int, vocabulary: int) -> None:
    parents, valid = random_trees(10, nodes, nodes)
    generator = torch.Generator().manual_seed(0)
    tokens, choice = torch.randint(vocabulary, (2, 10, nodes), generator=generator)
    total = sum(check(backend, chains, tokens, parents, valid, choice, depth) for depth in (0, 3, nodes - 1, nodes + 2))
    assert total > 0 or vocabulary > 3 or nodes == 1


def test_ties_go_to_the_lowest_index_and_depth_wins(backend: Any, chains: Any) -> None:
    #   0 - 1, 0 - 2 - 3, 0 - 4 - 5: all accepted; 3 and 5 tie.
    parents = torch.tensor([[-1, 0, 0, 2, 0, 4]])
    valid = torch.ones(1, 6, dtype=torch.bool)
    same = torch.full((1, 6), 7)
    assert check(backend, chains, same, parents, valid, same, 5) == 2
    ancestors, depths = tree_layout(parents, valid)
    path, _ = backend.op("accept")(*(x.to(backend.device) for x in (same, parents, valid, ancestors, depths, same)), 5)
    assert path.tolist() == [[0, 2, 3, 3, 4, 5]]


def test_more_levels_than_nodes(backend: Any, chains: Any) -> None:
    parents, valid = torch.tensor([[-1, 0]]), torch.tensor([[False, True]])
    check(backend, chains, torch.tensor([[5, 6]]), parents, valid, torch.tensor([[6, 6]]), 4)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tree(backend: Any, chains: Any, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 10))
    parents = data.draw(st.lists(st.integers(-2, nodes + 1), min_size=nodes, max_size=nodes))
    valid, tokens, choice = (
        torch.tensor([data.draw(st.lists(of, min_size=nodes, max_size=nodes))])
        for of in (st.booleans(), st.integers(0, 2), st.integers(0, 2))
    )
    depth = data.draw(st.integers(0, nodes + 1))
    check(backend, chains, tokens, torch.tensor([[-1, *parents[1:]]]), valid, choice, depth)


@pytest.mark.parametrize("nodes", [1, 34])
def test_opcheck(random_trees: Any, nodes: int) -> None:
    parents, valid = random_trees(5, nodes, 0)
    ancestors, depths = tree_layout(parents, valid)
    tokens = torch.randint(2, (5, nodes))
    torch.library.opcheck(accept_op, (tokens, parents, valid, ancestors, depths, tokens, 4))

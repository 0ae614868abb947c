"""Acceptance, emission and commit against plain Python, on random trees."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.graphs.accept import accept, ancestor_mask, emit
from specstep.graphs.state import FREE, FULL, RUNNING, STOPPED
from specstep.graphs.step import commit
from specstep.graphs.tree import DraftTree


@st.composite
def trees(draw, most_nodes=12, vocabulary=4):
    """A batch of random trees whose siblings carry distinct tokens, with what the target chooses at each node."""
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, most_nodes))
    rows = []
    for _ in range(batch):
        tokens, parents, valid = [draw(st.integers(0, vocabulary - 1))], [-1], [True]
        for node in range(1, count):
            parent = draw(st.integers(0, node - 1))
            token = draw(st.integers(0, vocabulary - 1))
            taken = {tokens[other] for other in range(1, node) if parents[other] == parent and valid[other]}
            good = valid[parent] and token not in taken and draw(st.integers(0, 9)) > 0
            tokens.append(token)
            parents.append(parent if good else 0)
            valid.append(good)
        rows.append((tokens, parents, valid, [draw(st.integers(0, vocabulary - 1)) for _ in range(count)]))
    columns = [torch.tensor([row[column] for row in rows]) for column in range(4)]
    return DraftTree(*columns[:3]), columns[3]


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == 0 else 1 + depth_of(parents, parents[node])


def walk(tree: DraftTree, choice: torch.Tensor, row: int) -> list[int]:
    """The accepted path: from the root, go to the child that carries the target's token, while there is one."""
    tokens, parents, valid = (part[row].tolist() for part in tree)
    path = [0]
    while True:
        children = [
            n
            for n in range(1, len(tokens))
            if valid[n] and parents[n] == path[-1] and tokens[n] == choice[row, path[-1]]
        ]
        if not children:
            return path
        path.append(children[0])


@settings(max_examples=300, deadline=None)
@given(trees())
def test_accept_walks_the_tree(case):
    tree, choice = case
    count = tree.tokens.shape[1]
    depth = max(depth_of(row, node) for row in tree.parents.tolist() for node in range(count))
    ancestors, depths = ancestor_mask(tree.parents, depth)
    path, accepted = accept(tree, ancestors, depths, choice, depth)
    for row, parents in enumerate(tree.parents.tolist()):
        assert depths[row].tolist() == [depth_of(parents, node) for node in range(count)]
        expected = walk(tree, choice, row)
        assert accepted[row] == len(expected) - 1
        assert path[row].tolist() == expected + list(range(len(expected), depth + 1))


@settings(max_examples=100, deadline=None)
@given(trees(most_nodes=9), st.data())
def test_another_node_never_shortens_the_path(case, data):
    tree, choice = case
    count = tree.tokens.shape[1]
    keep = data.draw(st.integers(1, count))
    lengths = []
    for size in (keep, count):
        part = DraftTree(*(column[:, :size] for column in tree))
        ancestors, depths = ancestor_mask(part.parents, count)
        lengths.append(accept(part, ancestors, depths, choice[:, :size], count)[1])
    assert (lengths[0] <= lengths[1]).all()


def row_state(**changes):
    state = {"lengths": 10, "limits": 100, "finish": RUNNING, "stop_ids": [-1, -1]} | changes
    return {name: torch.tensor([value]) for name, value in state.items()}


def test_emit_cuts_at_stop_limit_and_state():
    path, choice = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[7, 8, 9, 6]])
    cases = [
        ({}, 2, [7, 8, 9], RUNNING),
        ({}, 0, [7], RUNNING),
        ({"stop_ids": [8, -1]}, 3, [7, 8], STOPPED),
        ({"stop_ids": [6, -1]}, 2, [7, 8, 9], RUNNING),  # the stop lies past the accepted path
        ({"limits": 13}, 3, [7, 8], FULL),
        ({"limits": 14}, 2, [7, 8, 9], FULL),
        ({"limits": 13, "stop_ids": [8, -1]}, 3, [7, 8], STOPPED),
        ({"limits": 12, "stop_ids": [8, -1]}, 3, [7], FULL),
        ({"finish": FREE}, 3, [], FREE),
        ({"finish": STOPPED}, 3, [], STOPPED),
    ]
    for changes, accepted, expected, code in cases:
        tokens, count, finish = emit(row_state(**changes), path, torch.tensor([accepted]), choice)
        assert tokens[0, : count[0]].tolist() == expected, changes
        assert finish.item() == code, changes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(0, 6), st.data())
def test_commit_moves_the_path_and_nothing_else(batch, depth, data):
    nodes = depth + 4
    paths = [[0, *sorted(data.draw(st.permutations(range(1, nodes)))[:depth])] for _ in range(batch)]
    lengths = [data.draw(st.integers(0, 9)) for _ in range(batch)]
    cache = torch.rand(batch, 2, 32, 4)
    expected = cache.clone()
    for row, path in enumerate(paths):
        for level, node in enumerate(path):
            expected[row, :, lengths[row] + level] = cache[row, :, lengths[row] + node]
    commit([cache], torch.tensor(lengths), torch.tensor(paths))
    assert torch.equal(cache, expected)

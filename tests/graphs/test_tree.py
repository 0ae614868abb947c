"""Tree growth against a plain-Python search, for random scorers."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.graphs.static_tree import StaticTree
from specstep.graphs.tree import Candidates, DraftTree, DynamicTree, chain, top


class TableScorer:
    """Scores that depend on the whole path: a seeded random table, with some candidates missing and some certain."""

    def __init__(self, batch: int, top_k: int, seed: int, quiet: bool = False):
        self.batch, self.top_k, self.seed, self.quiet = batch, top_k, seed, quiet
        self.paths = [[()] for _ in range(batch)]  # per row, the path of each node of the last frontier

    def children(self, row: int, path: tuple[int, ...]) -> list[tuple[int, float]]:
        """(token, log-probability) of each candidate below a path."""
        draw = torch.Generator().manual_seed(hash((self.seed, row, path)) % 2**31)
        tokens = torch.randperm(50, generator=draw)[: self.top_k].tolist()
        shares = torch.rand(self.top_k, generator=draw).sort(descending=True).values
        scores = [math.log(share) for share in (shares / shares.sum().clamp(min=1.0)).tolist()]
        kind = int(torch.randint(0, 6, (1,), generator=draw))
        if self.quiet or kind == 0:
            scores = [-math.inf] * self.top_k
        elif kind == 1:  # a certain child has its parent's score: the tie must go to the parent
            scores = [0.0] + [-math.inf] * (self.top_k - 1)
        return list(zip(tokens, scores, strict=True))

    def __call__(self, tokens: torch.Tensor, parents: torch.Tensor) -> Candidates:
        for row in range(self.batch):
            chosen = zip(tokens[row].tolist(), parents[row].tolist(), strict=True)
            self.paths[row] = [(*self.paths[row][parent], token) for token, parent in chosen]
        return self.candidates()

    def root(self) -> Candidates:
        """What may follow the root."""
        self.paths = [[()] for _ in range(self.batch)]
        return self.candidates()

    def candidates(self) -> Candidates:
        """Those of the nodes in `paths`."""
        rows = [[self.children(row, path) for path in paths] for row, paths in enumerate(self.paths)]
        table = torch.tensor(rows, dtype=torch.float64)
        return Candidates(table[..., 0].to(torch.int64), table[..., 1].float())


def paths_of(tree: DraftTree, row: int) -> dict[tuple[int, ...], int]:
    """Token path (without the root) of each valid node, with its index; checks the form on the way."""
    tokens, parents, valid = (part[row].tolist() for part in tree)
    assert parents[0] == -1 and valid[0]
    paths = {0: ()}
    for node in range(1, len(tokens)):
        if valid[node]:
            assert 0 <= parents[node] < node
            paths[node] = (*paths[parents[node]], tokens[node])  # KeyError: a node without its parent
    found = {path: node for node, path in paths.items() if path}
    assert len(found) == len(paths) - 1, "siblings carry equal tokens"
    return found


def best_first(scorer: TableScorer, row: int, depth: int, top_k: int, nodes: int) -> dict[tuple[int, ...], float]:
    """The tree by the book: levels of top_k nodes with top_k children, then the best of all."""
    frontier, everything = [((), 0.0)], []
    for _ in range(depth):
        level = []
        for path, score in frontier:
            for token, log_prob in scorer.children(row, path):
                level.append(((*path, token), float(torch.tensor(score) + torch.tensor(log_prob))))
        everything += level
        frontier = sorted(level, key=lambda item: -item[1])[:top_k]
    best = sorted(everything, key=lambda item: -item[1])[:nodes]  # stable: earlier levels win ties
    return {path: score for path, score in best if score > -math.inf}


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6), st.data())
def test_dynamic_tree_is_the_best_first_tree(depth, top_k, batch, seed, data):
    most = sum(DynamicTree.level_sizes(depth, top_k))
    nodes = data.draw(st.integers(depth, most))
    scorer = TableScorer(batch, top_k, seed)
    tree, scored = DynamicTree(depth, top_k, nodes).grow(torch.arange(batch), scorer.root(), scorer)
    assert tree.tokens.shape == (batch, nodes + 1) and scored.shape == (batch, nodes)
    for row in range(batch):
        expected = best_first(scorer, row, depth, top_k, nodes)
        got = paths_of(tree, row)
        order = sorted(got, key=lambda path: got[path])
        scores = dict(best_first(scorer, row, depth, top_k, most))
        assert all(scores[before] > scores[after] - 1e-4 for before, after in itertools.pairwise(order))
        assert all(abs(scored[row, got[path] - 1] - scores[path]) < 1e-4 for path in order)
        assert (scored[row].isfinite() == tree.valid[row, 1:]).all()
        if set(got) != set(expected):  # scores that agree to 2^-18 may be ordered either way
            odd = set(got) ^ set(expected)
            limit = min(expected.values())
            assert all(len(path) <= depth for path in odd)
            assert all(abs(scores[path] - limit) < 1e-4 for path in odd)


@settings(max_examples=100, deadline=None)
@given(
    st.sets(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
    st.integers(0, 10**6),
)
def test_static_tree_follows_its_choices(seeds, seed):
    choices = {path[:end] for path in seeds for end in range(1, len(path) + 1)}
    shape = StaticTree(list(choices))
    scorer = TableScorer(2, shape.top_k, seed)
    tree, scored = shape.grow(torch.zeros(2, dtype=torch.int64), scorer.root(), scorer)
    for row in range(2):
        expected = {}
        for choice in choices:
            path, total = (), 0.0
            for rank in choice:
                token, score = scorer.children(row, path)[rank]
                total += score
                path = (*path, token)
            if total > -math.inf:
                expected[path] = total
        got = paths_of(tree, row)
        assert set(got) == set(expected)
        assert all(abs(scored[row, node - 1] - expected[path]) < 1e-4 for path, node in got.items())
        assert (scored[row].isfinite() == tree.valid[row, 1:]).all()


def test_silent_scorer_gives_an_empty_tree():
    for shape in (DynamicTree(3, 2, 5), StaticTree([(0,), (1,), (0, 0)]), chain(4)):
        scorer = TableScorer(2, shape.top_k, 0, quiet=True)
        tree, _ = shape.grow(torch.tensor([7, 8]), scorer.root(), scorer)
        assert tree.valid.tolist() == [[True] + [False] * shape.nodes] * 2


def test_bare_root():
    scorer = TableScorer(2, 1, 0)
    tree, scores = chain(0).grow(torch.tensor([4, 5]), scorer.root(), scorer)
    assert tree.tokens.tolist() == [[4], [5]] and tree.parents.tolist() == [[-1], [-1]]
    assert scores.shape == (2, 0)


def test_chain_is_the_greedy_path():
    scorer = TableScorer(1, 1, 5)
    tree, _ = chain(4).grow(torch.tensor([3]), scorer.root(), scorer)
    assert tree.parents[0].tolist()[1] == 0
    assert all(parent in (0, node - 1) for node, parent in enumerate(tree.parents[0].tolist()) if node)


@given(st.lists(st.sampled_from([0.0, -0.5, -1.0, -math.inf, -30.25]), min_size=1, max_size=40), st.data())
def test_top_breaks_ties_by_index(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert top(torch.tensor([scores]), k)[0].tolist() == order[:k]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "at least one"),
        ([(0,), (0,)], "unique"),
        ([(0, 0)], "prefix"),
        ([(-1,)], "ranks >= 0"),
        ([()], "ranks >= 0"),
    ],
)
def test_bad_choices_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        StaticTree(choices)


@pytest.mark.parametrize("numbers", [(3, 2, 2), (2, 2, 7), (-1, 2, 3)])
def test_dynamic_tree_that_cannot_fit_is_refused(numbers):
    with pytest.raises(ValueError, match="nodes: expected between"):
        DynamicTree(*numbers)

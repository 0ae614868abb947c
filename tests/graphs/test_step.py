"""The whole step against a plain-Python tree decoder, on thousands of random trees.

The target is a toy language model whose next token is a sum over all visible (token, position) pairs, read back
from the cache through the pass's own mask: a wrong mask, slot, position or compaction changes what it says.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.graphs.state import row_state
from specstep.graphs.step import SpeculativeStep
from specstep.graphs.tree import DraftTree, tree_state
from specstep.kernels.tree_attention.reference import visible_slots
from specstep.report import FULL, RUNNING, SCORE_STEPS, STOPPED, AcceptedNode, RowReport

VOCABULARY, SLOTS = 7, 64


def next_token(prefix: list[int]) -> int:
    """The toy language model by its definition."""
    return sum(token * (3 * place + 1) for place, token in enumerate(prefix)) % VOCABULARY


class ToyTarget(torch.nn.Module):
    """The toy language model over a cache: keys hold tokens, values hold positions."""

    layers = 1

    def forward(self, tokens, where, keys, values):
        rows = torch.arange(tokens.shape[0])[:, None]
        keys[0][rows, 0, where.slots, 0] = tokens.float()
        values[0][rows, 0, where.slots, 0] = where.positions.float()
        seen = visible_slots(where.lengths, where.depths, where.ancestors, where.key_depths, SLOTS)
        terms = keys[0][:, 0, :, 0].long() * (3 * values[0][:, 0, :, 0].long() + 1)
        choice = (seen * terms[:, None]).sum(-1) % VOCABULARY
        return torch.nn.functional.one_hot(choice, VOCABULARY).float(), None


class ScriptedDrafter(torch.nn.Module):
    """Grows trees of prepared shapes below what the state says the rows hold."""

    def __init__(self, steps):
        """steps: of each step, of each row, the (parent, kind) of each node; the last ones are drafted again."""
        super().__init__()
        self.steps, self.drafted, self.scorer = steps, [], self
        self.depth = self.nodes = len(steps[0][0])
        self.shape, self.target_caches = None, ()

    def forward(self, state, keys, values):
        shapes = self.steps[min(len(self.drafted), len(self.steps) - 1)]
        ends = (state["lengths"] + 1).tolist()
        texts = [row[:end] for row, end in zip(state["history"].tolist(), ends, strict=True)]
        self.drafted.append([grow(text, shape) for text, shape in zip(texts, shapes, strict=True)])
        tree = DraftTree(*(torch.tensor([tree[part] for tree in self.drafted[-1]]) for part in range(3)))
        return tree_state(tree), torch.arange(1, 1 + self.nodes).float().log().neg().expand(len(texts), -1)

    def commit(self, state, path, features):
        return {}

    def state(self, shape):
        return {}

    def shared(self):
        return {}


@st.composite
def plans(draw):
    """Rows with prompts, limits and stop tokens, and for each step and row the shape of a tree: (parent, kind) per
    node."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    rows = [
        {
            "prompt": draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)),
            "room": draw(st.integers(1, 12)),
            "stop": draw(st.integers(-1, VOCABULARY - 1)) if draw(st.booleans()) else -1,
        }
        for _ in range(batch)
    ]
    node = st.tuples(st.integers(0, 99), st.integers(0, 5))
    steps = draw(
        st.lists(
            st.lists(st.lists(node, min_size=nodes, max_size=nodes), min_size=batch, max_size=batch),
            min_size=3,
            max_size=5,
        )
    )
    return rows, nodes, steps


def grow(prefix: list[int], shape: list[tuple[int, int]]) -> tuple[list[int], list[int], list[bool]]:
    """A tree below the last token of a prefix. Most nodes carry the target's own token, some another, some are
    invalid."""
    tokens, parents, valid, paths = [prefix[-1]], [-1], [True], [prefix]
    for index, (parent, kind) in enumerate(shape, 1):
        parent %= index
        token = (next_token(paths[parent]) + (0 if kind < 4 else 1 + kind)) % VOCABULARY
        siblings = {tokens[n] for n in range(1, index) if parents[n] == parent and valid[n]}
        good = valid[parent] and token not in siblings and kind != 5
        tokens.append(token)
        parents.append(parent)
        valid.append(good)
        paths.append([*paths[parent], token])
    return tokens, parents, valid


def decode(prefix: list[int], tree: tuple[list[int], list[int], list[bool]]) -> list[int]:
    """Plain tree decoding: walk to the child that carries the target's token while there is one; then the target's
    own."""
    return [next_token(prefix + [tree[0][node] for node in path]) for path in walk(prefix, tree)]


def walk(prefix: list[int], tree: tuple[list[int], list[int], list[bool]]) -> list[list[int]]:
    """The nodes on the way to each node of that walk, the root left out."""
    tokens, parents, valid = tree
    path, paths = [], [[]]
    while True:
        wanted, above = next_token(prefix + [tokens[node] for node in path]), path[-1] if path else 0
        children = [n for n in range(1, len(tokens)) if valid[n] and parents[n] == above and tokens[n] == wanted]
        if not children:
            return paths
        path = [*path, children[0]]
        paths.append(path)


def check_path(tree: tuple[list[int], list[int], list[bool]], path: tuple[AcceptedNode, ...]) -> None:
    """Nodes of a reported path hang below each other, and their ranks count the valid siblings before them."""
    _, parents, valid = tree
    above = 0
    for node, rank in path:
        assert parents[node] == above
        assert rank == sum(valid[other] and parents[other] == above for other in range(1, node))
        above = node


def cut(out: list[int], room: int, stop: int) -> tuple[list[int], int]:
    """Stop token and limit."""
    end = out.index(stop) + 1 if stop in out else len(out)
    kept = out[: min(end, room)]
    if kept[-1] == stop:
        return kept, STOPPED
    return kept, FULL if len(kept) == room else RUNNING


def fresh(rows, drafter):
    """State and caches of rows with prefilled prompts and drafted trees; junk wherever nothing was written."""
    batch, declared = len(rows), row_state(SLOTS, drafter.depth, VOCABULARY)
    state = {name: torch.full((batch, *t.shape), t.fill, dtype=t.dtype) for name, t in declared.items()}
    keys, values = ([torch.full((batch, 1, SLOTS, 1), 5.0)] for _ in range(2))
    state["history"].fill_(3)
    for row, plan in enumerate(rows):
        prompt = plan["prompt"]
        state["history"][row, : len(prompt)] = torch.tensor(prompt)
        state["lengths"][row], state["limits"][row] = len(prompt) - 1, len(prompt) + plan["room"]
        state["stop_ids"][row, 0], state["finish"][row] = plan["stop"], RUNNING
        for place, token in enumerate(prompt[:-1]):
            keys[0][row, 0, place, 0], values[0][row, 0, place, 0] = token, place
    return state | drafter(state, keys, values)[0], keys, values


@settings(max_examples=400, deadline=None)
@given(plans(), st.data())
def test_step_equals_the_plain_decoder(plan, data):
    """Any number of nodes at each step."""
    rows, nodes, steps = plan
    drafter = ScriptedDrafter(steps)
    state, keys, values = fresh(rows, drafter)
    step = SpeculativeStep(ToyTarget(), drafter)
    texts, ended = [list(row["prompt"]) for row in rows], [RUNNING] * len(rows)
    for shapes in steps:
        count = 1 + data.draw(st.integers(0, nodes))
        report, after = step(torch.arange(count), state, keys, values)
        trees = drafter.drafted[-2]  # the last ones are those of the next step
        assert trees == [grow(text, shape) for text, shape in zip(texts, shapes, strict=True)]
        for row, whole in enumerate(trees):
            tree = tuple(part[:count] for part in whole)
            out, expected = decode(texts[row], tree), []
            if ended[row] == RUNNING:
                room = len(rows[row]["prompt"]) + rows[row]["room"] - len(texts[row])
                expected, ended[row] = cut(out, room, rows[row]["stop"])
            got = RowReport.read(report[row].numpy())
            assert (got.tokens, got.finish) == (expected, ended[row])
            assert got.scores == [round(SCORE_STEPS / node) for node in range(1, 1 + nodes)]
            assert [tree[0][node] for node, _ in got.path] == (out[:-1] if expected else [])
            check_path(tree, got.path)
            if expected:
                assert [got.missed] == [*walk(texts[row], whole)[-1], 0][len(got.path) :][:1]
            texts[row] += expected
            length = len(texts[row]) - 1
            assert after["lengths"][row] == length and after["finish"][row] == ended[row]
            assert state["history"][row, : length + 1].tolist() == texts[row]
            assert keys[0][row, 0, :length, 0].tolist() == texts[row][:-1]
            assert values[0][row, 0, :length, 0].tolist() == list(range(length))
        state |= after


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_another_node_never_shortens_the_path(plan, data):
    rows, nodes, steps = plan
    keep = data.draw(st.integers(0, nodes))
    counts = []
    for size in (keep, nodes):
        drafter = ScriptedDrafter([[shape[:size] for shape in steps[0]]])
        state, keys, values = fresh(rows, drafter)
        counts.append(SpeculativeStep(ToyTarget(), drafter)(torch.arange(1 + size), state, keys, values)[0][:, 2])
    assert (counts[0] <= counts[1]).all()

"""The choice at every node of random trees, against transformers' processors on the row and the path of the node."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_sampling import Asked, written
from specstep.graphs import choice as module
from specstep.graphs.choice import banned_tokens, preceding_tokens, sampled_choice
from specstep.graphs.state import row_state
from specstep.graphs.tree import DraftTree
from specstep.kernels.bits import pack_bits
from specstep.kernels.choose import reference
from specstep.kernels.noise import gumbel
from specstep.kernels.tree_layout.op import tree_layout

VOCABULARY, SLOTS = 12, 40
token_ids = st.integers(0, VOCABULARY - 1)


@st.composite
def requests(draw):
    """Any combination of what can be asked for."""

    def maybe(values, otherwise):
        return draw(values) if draw(st.booleans()) else otherwise

    return Asked(
        temperature=maybe(st.sampled_from([0.3, 1.0, 1.7]), 0.0),
        top_k=maybe(st.integers(1, VOCABULARY + 3), 0),
        top_p=maybe(st.sampled_from([0.01, 0.5, 0.83, 0.97]), 1.0),
        min_p=maybe(st.sampled_from([0.02, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.7, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-1.5, 0.8, 2.0]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.7, 0.4, 2.0]), 0.0),
        bias=maybe(st.dictionaries(token_ids, st.sampled_from([-6.5, -0.4, 1.1, 5.0]), max_size=4), {}),
        suppressed=maybe(st.lists(token_ids, min_size=1, max_size=3), ()),
        bad_words=maybe(words, ()),
        min_new_tokens=maybe(st.integers(1, 6), 0),
        stop_ids=draw(st.lists(token_ids, max_size=3, unique=True)),
        seed=draw(st.sampled_from([0, 1, 2**32 + 5, 2**63 - 1])),
    )


few = st.integers(0, 2)  # so that words are met
words = st.lists(st.one_of(st.lists(few, min_size=2, max_size=3), st.lists(few, min_size=8, max_size=8)), max_size=4)


@st.composite
def situations(draw):
    """Rows, each a request, a prompt, an output and a tree of as many nodes; a node may have no place in its tree."""
    nodes = draw(st.integers(0, 7))
    some = st.one_of(few, token_ids)
    node = st.tuples(st.integers(0, 99), some, st.sampled_from([True, True, True, False]))
    row = st.tuples(
        requests(),
        st.lists(some, min_size=1, max_size=9),
        st.lists(some, max_size=9),
        st.lists(node, min_size=nodes, max_size=nodes),
        st.none() | st.lists(st.sets(token_ids), min_size=nodes + 1, max_size=nodes + 1),  # tokens not allowed
    )
    return draw(st.lists(row, min_size=1, max_size=3)), draw(st.integers(0, 2**31))


def laid_out(rows):
    """Rows as the state has them, with junk past their ends -> tree, state, and the path of each node of each row."""
    nodes = len(rows[0][3])
    declared = row_state(SLOTS, nodes, VOCABULARY)
    state = {name: torch.full((len(rows), *t.shape), t.fill, dtype=t.dtype) for name, t in declared.items()}
    state["history"] = torch.randint(0, 3, state["history"].shape, generator=torch.Generator().manual_seed(0))
    trees, paths = [], []
    for place, (asked, prompt, output, shape, forbidden) in enumerate(rows):
        text = [*prompt, *output]
        state["history"][place, : len(text)] = torch.tensor(text)
        state["lengths"][place], state["prompt_lengths"][place] = len(text) - 1, len(prompt)
        written(state, place, asked.controls(len(prompt)) | {"stop_ids": asked.stop_ids})
        if forbidden is not None:
            mask = torch.tensor([[token not in few for token in range(VOCABULARY)] for few in forbidden])
            state["masked"][place], state["allowed"][place] = 1, pack_bits(mask)
        nodes = [(text[-1], -1, True)]
        nodes += [(token, parent % place, valid) for place, (parent, token, valid) in enumerate(shape, 1)]
        valid, own = [True], [[]]
        for token, parent, wanted in nodes[1:]:
            valid.append(wanted and valid[parent])
            own.append([*own[parent], token] if valid[-1] else None)
        trees.append([(token, parent, good) for (token, parent, _), good in zip(nodes, valid, strict=True)])
        paths.append(own)
    columns = torch.tensor(trees).unbind(2)
    return DraftTree(columns[0], columns[1], columns[2].bool()), state, paths


@settings(max_examples=100, deadline=None)
@given(situations())
def test_every_node_is_plain_decoding_of_its_path(situation):
    rows, draw = situation
    tree, state, paths = laid_out(rows)
    logits = 3 * torch.randn(*tree.tokens.shape, VOCABULARY, generator=torch.Generator().manual_seed(draw))
    layout = tree_layout(tree.parents, tree.valid)
    got = sampled_choice(logits, tree, *layout, int(layout[1].max()), state)
    scores = scaled_by_the_reference(logits, tree, layout, state)
    for row, (asked, prompt, output, _, forbidden) in enumerate(rows):
        for node, path in enumerate(paths[row]):
            if path is None:
                continue
            tokens = [*prompt, *output, *path]
            masked = logits[row, node].clone()
            if forbidden is not None:
                masked[list(forbidden[node])] = -torch.inf
            expected = asked.scores(len(prompt), tokens, masked)
            if asked.temperature > 0:
                torch.testing.assert_close(scores[row, node], expected, rtol=1e-5, atol=1e-5)
                place = torch.tensor([len(tokens)])
                expected = expected + gumbel(torch.tensor([asked.seed]), place, torch.arange(VOCABULARY))
            best, next_best = expected.topk(2).values.tolist()
            if best == -torch.inf:
                assert got[row, node] == 0, "where no token is left"
            elif best - next_best > 1e-4:
                assert got[row, node] == expected.argmax(), (row, node)


def scaled_by_the_reference(logits, tree, layout, state):
    """What the reference adds the noise to."""
    seen, filtered = [], reference.filtered

    def watched(*given):
        seen.append(filtered(*given))
        return seen[-1]

    reference.filtered, op, module.choose = watched, module.choose, reference.choose
    try:
        sampled_choice(logits, tree, *layout, int(layout[1].max()), state)
    finally:
        reference.filtered, module.choose = filtered, op
    return seen[0]


@settings(max_examples=60, deadline=None)
@given(situations(), st.integers(1, 9))
def test_preceding_tokens_are_those_of_the_path(situation, count):
    tree, state, paths = laid_out(situation[0])
    _, depths = tree_layout(tree.parents, tree.valid)
    got = preceding_tokens(tree, depths, int(depths.max()), state, count)
    for row, (_, prompt, output, *_) in enumerate(situation[0]):
        for node, path in enumerate(paths[row]):
            if path is not None:
                tokens = ([-1] * count + prompt + output + path)[-count:]
                assert got[row, node].tolist() == tokens


def test_nothing_is_banned_where_nothing_is_asked():
    tree, state, _ = laid_out([(Asked(stop_ids=(1, 2)), [1, 2], [], [(0, 1, True)], None)])
    assert (banned_tokens(tree, torch.tensor([[0, 1]]), 1, state) == -1).all()

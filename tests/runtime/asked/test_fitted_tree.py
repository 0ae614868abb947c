"""Drafted trees that are fitted to a grammar: pruned, with what it forces, and never another text."""

import numpy as np
import pytest
import specstep
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_model, tiny_tokenizer
from specstep import DraftedTree, SamplingParams
from specstep.report import SCORE_STEPS
from specstep.runtime.asked.grammar import Grammar
from specstep.runtime.asked.grammar_masks import GrammarMasks
from specstep.runtime.asked.structured import checked_structured
from specstep.runtime.text.tokenizer import EngineTokenizer

EOS, VOCABULARY, NODES, DEPTH = 1, 320, 7, 4
WORDS = "abc"


@pytest.fixture(scope="module")
def text():
    return EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})


def masks_of(text, structured):
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", structured))
    return grammar.masks([EOS])


@st.composite
def trees(draw, tokens):
    """A drafted tree of these tokens: siblings differ, and there may be places without a node at the end."""
    parents, drawn, taken = [-1], [draw(st.sampled_from(tokens))], set()
    for node in range(1, 1 + draw(st.integers(0, NODES))):
        parent = draw(st.integers(0, node - 1))
        free = [token for token in tokens if (parent, token) not in taken]
        if not free:
            break
        drawn.append(draw(st.sampled_from(free)))
        parents.append(parent)
        taken.add((parent, drawn[-1]))
    gaps = NODES + 1 - len(parents)
    return DraftedTree([*drawn, *[0] * gaps], [*parents, *[-1] * gaps])


def paths(tree):
    """The tokens below the root down to each node."""
    found = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append(None if parent < 0 else (*found[parent], token))
    return found


def allowed(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCABULARY]))


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": "(ab|ac)(bc)*a{2}"},
        {"choice": ["abcabcab", "abccc", "b"]},
        {"regex": "[abc]*"},
        {"choice": ["abc"]},
        {"grammar": 'root ::= "ab" root "c" | "c"'},
    ],
)
@settings(max_examples=40)
@given(data=st.data())
def test_a_fitted_tree(structured, text, data):
    """Against the masks of the same tokens asked for one by one."""
    tokens = [*text.encode_part(WORDS), EOS]
    drafted, depth, nodes = data.draw(trees(tokens)), data.draw(st.integers(1, DEPTH)), data.draw(st.integers(0, NODES))
    masks = masks_of(text, structured)
    fitted = masks.fit([], drafted, nodes, depth)
    tree, found = fitted.tree, paths(fitted.tree)
    assert tree.tokens[0] == drafted.tokens[0] and tree.parents[0] == -1 and len(tree.tokens) <= 1 + nodes
    assert len(set(found)) == len(found) and max(map(len, found)) <= depth
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents[1:], 1))
    whole = {}
    for path in found:
        chain = DraftedTree([0, *path], list(range(-1, len(path))))
        whole[path] = allowed(masks_of(text, structured)([], chain)[-1])
    for path in found[1:]:
        assert path[-1] in whole[path[:-1]], "nothing that the grammar forbids"
    drafts = {path for path in paths(drafted)[1:] if path is not None}
    for path, origin in zip(found[1:], fitted.origins, strict=True):
        assert (origin > 0) == (path in drafts)
        assert origin > 0 or len(whole[path[:-1]]) == 1, "what nobody drafted is forced"
        assert origin == 0 or paths(drafted)[origin] == path
    if len(found) < 1 + nodes:  # nothing was left out
        for path in found:
            if len(path) < depth and EOS not in path:
                below = {each[-1] for each in found if len(each) == len(path) + 1 and each[:-1] == path}
                wanted = {token for token in whole[path] if (*path, int(token)) in drafts}
                assert below == (whole[path] if len(whole[path]) == 1 else wanted)
    certain = [path for path in found[1:] if all(len(whole[path[:length]]) == 1 for length in range(len(path)))]
    assert found[1 : 1 + fitted.certain] == certain
    # The masks of the fitted tree are those that it was made with.
    again = masks([], tree)
    for node, path in enumerate(found):
        assert allowed(again[node]) == whole[path]


@settings(max_examples=60)
@given(data=st.data())
def test_a_likely_token_is_drafted_first(text, data):
    """What the grammar allows of it; nothing of it is certain, and all else stays in the order that it had."""
    tokens = [*text.encode_part(WORDS), EOS]
    drafted, likely = data.draw(trees(tokens)), dict.fromkeys(tokens)
    likely |= data.draw(st.dictionaries(st.sampled_from(tokens), st.sampled_from(tokens)))
    structured = data.draw(st.sampled_from([{"regex": "(ab|ac)(bc)*a{2}"}, {"regex": "[abc]*"}, {"choice": ["abc"]}]))
    masks = masks_of(text, structured)
    masks._habits = FollowsToken(likely)
    fitted = masks.fit([], drafted, NODES, DEPTH)
    found = paths(fitted.tree)
    assert len(set(found)) == len(found) and max(map(len, found)) <= DEPTH
    again = [allowed(bits) for bits in masks([], fitted.tree)]
    drafts = {path for path in paths(drafted)[1:] if path is not None}
    for node, path in enumerate(found[1:], 1):
        above, ahead = again[fitted.tree.parents[node]], path[-2] if len(path) > 1 else drafted.tokens[0]
        assert path[-1] in above
        assert path in drafts or len(above) == 1 or path[-1] == likely[ahead]
    first = likely[drafted.tokens[0]]
    if first in again[0]:
        assert found[1] == (first,)
    certain = 0
    while certain + 1 < len(found) and len(again[certain]) == 1 and fitted.tree.parents[certain + 1] == certain:
        certain += 1
    assert fitted.certain == certain


class FollowsToken:
    """Habits that ask for the token ahead alone."""

    def __init__(self, likely):
        self.table = likely

    def likely(self, mask, behind):
        return self.table.get(behind[-1])

    def learn(self, mask, behind, token):
        """Nothing."""


def test_habits_are_asked_and_taught_with_the_tokens_ahead(text):
    """Those of the output, and the root ahead of one."""
    a, b, c = text.encode_part(WORDS)
    masks, told = masks_of(text, {"regex": "[abc]*"}), Told()
    masks._habits = told
    masks([], masks.fit([], DraftedTree([9, a, b], [-1, 0, 1]), 2, 3).tree)
    assert told.asked == [[9], [9, a]] and not told.taught
    masks.fit([a, b, c], DraftedTree([c, a], [-1, 0]), 2, 3)
    assert told.taught == [([9], a), ([9, a], b), ([9, a, b], c)]
    assert told.asked[2:] == [[b, c], [b, c, a]]


class Told:
    """Habits that note what they are asked and taught."""

    def __init__(self):
        self.asked, self.taught = [], []

    def likely(self, mask, behind):
        self.asked.append(list(behind))

    def learn(self, mask, behind, token):
        self.taught.append((list(behind), token))


def test_scores_of_forced_nodes_are_those_of_their_parents(text):
    a, b, c = text.encode_part(WORDS)
    drafted = DraftedTree([9, a, b, b, 0], [-1, 0, 0, 1, -1])
    fitted = masks_of(text, {"choice": ["abc", "bcc"]}).fit([], drafted, 4, 3)
    assert fitted.tree == DraftedTree([9, a, b, c, b], [-1, 0, 1, 2, 0])
    assert fitted.origins == [1, 3, 0, 2] and fitted.certain == 0
    assert fitted.scores([80, 70, 60, 0]) == [80, 60, 60, 70]
    forced = masks_of(text, {"choice": ["abc"]}).fit([], DraftedTree([9], [-1]), 4, 2)
    assert forced.tree == DraftedTree([9, a, b], [-1, 0, 1]) and forced.certain == 2
    assert forced.scores([5, 4, 3, 2]) == [SCORE_STEPS, SCORE_STEPS, 0, 0]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "ba"]},
        "others": {"type": "array", "items": {"type": "boolean"}, "minItems": 9},
    },
    "required": ["name", "others"],
    "additionalProperties": False,
}


def test_documents_are_drafted_by_those_before(tmp_path):
    """By another document of the same kind, and never another text."""
    save_model(tmp_path, tokenizer=True)
    sampling = SamplingParams(structured={"json": SCHEMA}, logit_bias={ord(" ") + 2: -100.0})
    with specstep.eager(str(tmp_path), drafter="ngram", dtype="float32", max_seq_len=256) as engine:
        apart = [engine.generate([seed], 120, sampling=sampling, learning=False) for seed in (5, 5, 6)]
        assert apart[0].stats["steps"] == apart[1].stats["steps"], "nothing was learned"
        first, again, other = (engine.generate([seed], 120, sampling=sampling) for seed in (5, 5, 6))
    for result, expected in ((first, apart[0]), (again, apart[0]), (other, apart[2])):
        assert result.token_ids == expected.token_ids
    assert again.stats["steps"] < first.stats["steps"] and other.stats["steps"] < apart[2].stats["steps"]


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_forced_text_takes_few_steps(drafter, tmp_path, monkeypatch):
    """A text that the grammar says is accepted as deep as trees are."""
    save_model(tmp_path, tokenizer=True)
    said = "the quick brown fox jumps over the lazy dog"
    sampling = SamplingParams(structured={"choice": [said]})
    with specstep.eager(str(tmp_path), drafter=drafter, dtype="float32", max_batch=2, max_seq_len=128) as engine:
        engine.learning = False
        results = engine.generate([[5, 6], [7, 8]], 60, sampling=[sampling, None])
        assert results[0].text == said
        depth = engine.spec.depth
        least = -(-len(results[0].token_ids) // (1 + depth))
        assert least <= results[0].stats["steps"] <= least + 1
        free = results[1].token_ids
        monkeypatch.setattr(GrammarMasks, "fit", lambda *_: pytest.fail("called for a row without a grammar"))
        assert engine.generate([7, 8], 60).token_ids == free

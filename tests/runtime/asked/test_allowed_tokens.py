"""The hook for masks: called before each step with the output and the tree, and its errors are its request's alone."""

import re
import time

import numpy as np
import pytest
from fake_session import FakeSession, alone
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep import DraftedTree, InputError
from specstep.runtime.asked.allowed_tokens import checked
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer

VOCABULARY, WORDS = 97, 4
ALL = np.full((3, WORDS), -1, np.int32)


def bits_of(rows):
    """Sets of tokens as bits."""
    words = np.zeros((len(rows), WORDS), np.uint32)
    for node, tokens in enumerate(rows):
        for token in tokens:
            words[node, token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


@pytest.fixture
def engine():
    with Engine(FakeSession(2), None) as opened:
        yield opened


def test_the_hook_sees_the_output_and_the_tree_of_each_step(engine):
    seen = []

    def allowed(output, tree):
        seen.append((list(output), tree))
        return ALL

    result = engine.generate([5, 6], 20, allowed_tokens=allowed)
    assert result.token_ids == alone([5, 6], 22) and len(seen) == result.stats["steps"]
    for output, tree in seen:
        assert output == result.token_ids[: len(output)]
        assert tree.tokens[0] == [5, 6, *output][-1]
        assert tree.parents == ([-1, 0, 1] if output else [-1, -1, -1]), "a first step has the root alone"
    assert seen[0][0] == [] and [len(output) for output, _ in seen] == sorted({len(output) for output, _ in seen})


def test_only_what_is_allowed_is_written_whatever_was_drafted(engine):
    def even(output, tree):
        return bits_of([range(0, VOCABULARY, 2)] * len(tree.tokens))

    free, held = engine.generate([[5, 6]], 20)[0], engine.generate([5, 6], 20, allowed_tokens=even)
    assert any(token % 2 for token in free.token_ids) and all(token % 2 == 0 for token in held.token_ids)


def test_a_mask_may_depend_on_the_output_so_far(engine):
    """The next token is the number of tokens written: nodes know their depth by their path."""

    def count(output, tree):
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return bits_of([{len(output) + depth} for depth in depths])

    assert engine.generate([5, 6], 15, allowed_tokens=count).token_ids == list(range(15))


def fails(output, tree):
    if len(output) >= 4:
        raise KeyError("of the grammar's own")
    return ALL


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (fails, KeyError, "of the grammar's own"),
        (lambda output, tree: None, InputError, r"expected an array of int32 \(3, 4\), got NoneType"),
        (lambda output, tree: ALL[:2], InputError, r"expected an array of int32 \(3, 4\), got int32 \(2, 4\)"),
        (lambda output, tree: ALL.astype(bool), InputError, r"expected an array of int32 \(3, 4\), got bool"),
        (lambda output, tree: ALL * 0, InputError, "expected at least one token that may follow node 0, got none"),
    ],
)
def test_its_errors_end_its_request_alone(hook, error, message, engine):
    beside = engine.submit(engine.request([7], 60))
    next(beside)
    stream = engine.submit(engine.request([5, 6], 30, allowed_tokens=hook))
    for _ in range(2):
        with pytest.raises(error, match=message):
            stream.result()
    read = stream.request.tokens
    assert stream.request.finish_reason == "failed" and read == alone([5, 6], 32)[: len(read)]
    assert beside.result().token_ids == alone([7], 61)
    assert engine.generate([[9], [8]], 9)[1].token_ids == alone([8], 10)
    assert engine.session.free_rows == 2


def test_a_grammar_that_is_at_its_end_fails_nobody_once_the_stop_string_was_read():
    """The worker asks on before its reader has found the stop string."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
    with Engine(FakeSession(1, vocabulary=258, accepts=lambda *_: 0), text) as engine:
        word = text.decode(alone([5], 5)[3:])

        def ends(output, tree):
            if len(output) > 6:
                raise KeyError("past the end")
            return np.full((3, 9), -1, np.int32)

        stopped = engine.request([5], 20, sampling={"stop": word}, allowed_tokens=ends)
        other = engine.request([7], 20)
        running = engine.run([stopped, other])
        deadline = time.monotonic() + 30
        while engine._scheduler._worker is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sum(1 for _ in running) == 4 + 20
        assert (stopped.finish_reason, other.finish_reason) == ("stop", "length")


def test_the_row_of_a_mask_is_free_of_it_afterwards(engine):
    engine.generate([5, 6], 5, allowed_tokens=lambda output, tree: bits_of([{3}] * 3))
    assert engine.generate([5, 6], 9).token_ids == alone([5, 6], 11)


@given(st.lists(st.sets(st.integers(0, VOCABULARY - 1), max_size=3), min_size=1, max_size=6), st.data())
def test_nodes_that_can_be_reached_have_something_to_follow(rows, data):
    """And bits past the vocabulary are none."""
    parents = [-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, len(rows))]
    tokens = [data.draw(st.sampled_from([0, 31, 32, 95, 96, *rows[max(parent, 0)]])) for parent in parents]
    bits = bits_of(rows)
    bits[:, -1] |= np.int32(-2)  # 97 to 127
    reached, wrong = {0}, set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node and parent in reached and token in rows[parent]:
            reached.add(node)
        if node in reached and not rows[node]:
            wrong.add(node)
    if not wrong:
        assert checked(bits, DraftedTree(tokens, parents), VOCABULARY) is bits
        return
    with pytest.raises(InputError, match=re.escape(f"may follow node {min(wrong)}, got none")):
        checked(bits, DraftedTree(tokens, parents), VOCABULARY)

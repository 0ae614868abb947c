"""What was served is kept for prompts that begin like it: within a budget, for its scope alone, and the text is the
same."""

import dataclasses
import random

import pytest
from fake_session import POISON, FakeSession, PrefillFailedError, alone
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.errors import InputError
from specstep.runtime import prefix_cache
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine
from specstep.runtime.prefix_cache import BLOCK

BLOCK_BYTES = BLOCK * 2 * 4  # of the fake session: two caches of an element each
LONG = [(7 * index + index * index) % 90 for index in range(99)]


def engine_of(rows=2, blocks=100, **options):
    return Engine(FakeSession(rows), None, prefix_cache_bytes=blocks * BLOCK_BYTES, **options)


def ask(engine, prompt, new_tokens=5, scope=""):
    """Generate -> the tokens that needed no prefill, and the new ones."""
    request = run(engine, Request(list(prompt), min(100, len(prompt) + new_tokens), [], prefix_scope=scope))
    assert request.tokens == alone(prompt, request.limit)
    return request.stats["cached_tokens"], request.tokens


def run(engine, request):
    for _ in engine.run([request]):
        pass
    return request


def kept(engine):
    return len(engine._scheduler._rows.prefixes._blocks)


def test_a_prompt_is_prefilled_once():
    """All but the last two tokens of a prompt, at most: one is the root, and a prefill drafts the first tree."""
    engine, prefilled = engine_of(), []
    prefill = engine.session.prefill
    engine.session.prefill = lambda row, tokens, count, slots: (
        prefilled.append(count), prefill(row, tokens, count, slots)
    )  # fmt: skip
    for length, cached in ((70, 63), (64, 62), (65, 63), (66, 63), (40, 31), (33, 31), (32, 30), (31, 0), (2, 0)):
        assert ask(engine, LONG[:70])[0] in (0, 63)
        prefilled.clear()
        assert ask(engine, LONG[:length])[0] == cached
        assert sum(prefilled) == length - 1 - cached


def test_what_a_drafter_does_not_know_yet_is_not_kept():
    """Of one whose slots depend on the third token after their own, three slots fewer."""
    session, recalled = FakeSession(2), []
    session.spec = dataclasses.replace(session.spec, lookahead=3)
    recall = session.recall
    session.recall = lambda row, *run: (recalled.append(run), recall(row, *run))
    engine = Engine(session, None, prefix_cache_bytes=100 * BLOCK_BYTES)
    assert [ask(engine, LONG[:length])[0] for length in (70, 70, 66, 34)] == [0, 61, 61, 29]
    assert [start + slots for start, _, slots in recalled][-1] == 29


def test_a_conversation_prefills_its_last_turn_alone():
    """The answer's keys and values are kept too."""
    engine, text = engine_of(), LONG[:20]
    for _ in range(4):
        before = len(text)
        cached, answer = ask(engine, text, 13)
        text = [*text, *answer, *LONG[before % 7 :][:6]]
        assert cached >= before - 6 - BLOCK - 1 if before > 52 else cached in (0, 31)
    assert cached == 63


def test_texts_that_part_share_what_they_have_in_common():
    engine = engine_of()
    ask(engine, LONG[:64])
    blocks = kept(engine)
    assert ask(engine, [*LONG[:40], *LONG[:24]])[0] == 31 and kept(engine) == blocks + 1
    assert ask(engine, [*LONG[:32], *LONG[50:82]])[0] == 31 and kept(engine) == blocks + 2
    assert ask(engine, [*LONG[:40], *LONG[:24]])[0] == 62
    assert ask(engine, LONG[1:70])[0] == 0, "the same tokens elsewhere are not the same"


def test_a_block_of_two_texts_holds_nothing_of_what_follows_it():
    """A drafter's slot depends on the token after it, which the first text decided: the fake session would notice."""
    engine = engine_of()
    ask(engine, LONG[:32] + [50] * 40)
    ask(engine, LONG[:32] + [60] * 40)
    assert ask(engine, LONG[:32] + [60] * 40)[0] == 63
    assert ask(engine, LONG[:32] + [70] * 40)[0] == 31


def test_scopes_share_nothing():
    engine = engine_of()
    assert [ask(engine, LONG, scope=scope)[0] for scope in ("", "a", "b", "a", "")] == [0, 0, 0, 95, 95]
    assert kept(engine) == 9


def test_nothing_is_kept_unless_asked():
    engine = Engine(FakeSession(1), None)
    assert [ask(engine, LONG)[0] for _ in range(2)] == [0, 0] and not hasattr(engine.session, "store")


def test_choices_of_a_prompt_start_from_the_first():
    engine = engine_of(4)
    requests = [Request(LONG[:90], 95, [], {"seeds": seed}) for seed in range(4)]
    for _ in engine.run(requests):
        pass
    assert [request.cached_tokens for request in requests] == [0, 63, 63, 63]


def test_the_least_recently_used_go_first_and_no_byte_is_above_the_budget():
    engine = engine_of(1, blocks=5)  # a text of 99 tokens takes 3
    first, second, third = (LONG[start:] + LONG[:start] for start in (0, 10, 20))
    ask(engine, first[:66])
    ask(engine, second[:66])
    assert kept(engine) == 4
    assert ask(engine, first[:66])[0] == 63  # used again: the second goes first
    ask(engine, third[:66])
    assert kept(engine) == 5 and len(engine.session.store) == 5 * BLOCK
    assert engine._scheduler._rows.prefixes.used_bytes == 5 * BLOCK_BYTES
    assert ask(engine, first[:66])[0] == 63
    assert ask(engine, third[:66])[0] == 63
    assert ask(engine, second[:66])[0] in (0, 31)


def test_a_text_longer_than_the_budget_keeps_its_beginning():
    engine = engine_of(1, blocks=2)
    ask(engine, LONG)
    assert ask(engine, LONG)[0] == 63 and kept(engine) == 2
    ask(engine, LONG[5:])
    assert ask(engine, LONG[5:])[0] == 63 and kept(engine) == 2


def test_what_a_failing_step_left_is_not_kept():
    engine = engine_of(1)
    engine.session.failing = 1
    with pytest.raises(RuntimeError, match="a step that fails"):
        run(engine, Request(LONG[:20], 90, []))
    assert kept(engine) == 0
    with pytest.raises(PrefillFailedError):
        run(engine, Request([*LONG[:40], POISON, 1], 90, []))
    assert kept(engine) == 1, "the chunks before the one that failed are right"
    assert ask(engine, LONG[:50])[0] == 31


def test_a_store_that_fails_fails_the_request_alone():
    engine, keep = engine_of(1, blocks=3), FakeSession.keep
    engine.session.keep = lambda *given: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        run(engine, Request(LONG[:70], 90, []))
    engine.session.keep = lambda *given: keep(engine.session, *given)
    assert [ask(engine, LONG[:70])[0] for _ in range(2)] == [0, 63] and engine.session.free_rows == 1
    assert ask(engine, LONG[3:99])[0] == 0 and kept(engine) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (-1, "prefix_cache_bytes: expected an integer of at least 1, got -1"),
        (1.5, "prefix_cache_bytes: expected an integer"),
        (BLOCK_BYTES - 1, f"expected 0, or at least {BLOCK_BYTES}, which 32 tokens take, got {BLOCK_BYTES - 1}"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(InputError, match=message):
        Engine(FakeSession(1), None, prefix_cache_bytes=wrong)


def test_a_scope_is_a_text():
    engine = engine_of()
    assert engine.request([5, 6], prefix_scope="of a key").prefix_scope == "of a key"
    with pytest.raises(InputError, match="prefix_scope: expected a text, got int"):
        engine.request([5, 6], prefix_scope=3)


texts = st.lists(st.integers(0, 1), max_size=95)
visits = st.tuples(texts, st.integers(1, 40), st.sampled_from(["", "a"]), st.booleans(), st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(st.lists(visits, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 9), st.integers(2, 20))
def test_random_prompts_with_random_joins_and_leaves(asked, rows, blocks, most):
    """Of two tokens, after a common beginning, so that many share much; some are left in the middle."""
    engine = engine_of(rows, blocks, prefill_per_step=most)
    common = random.Random(0).choices(range(2), k=64)
    streams = []
    for tail, new_tokens, scope, whole, reads in asked:
        prompt = (common[: len(tail) * 3] + tail)[:98] or [1]
        request = Request(prompt, min(100, len(prompt) + new_tokens), [], prefix_scope=scope)
        streams.append((engine.submit(request), whole, reads))
    for stream, whole, reads in streams:
        request = stream.request
        for number, _ in enumerate(stream):
            if not whole and number >= reads:
                stream.cancel()
        expected = alone(request.prompt, request.limit)
        assert request.tokens == (expected if whole else expected[: len(request.tokens)])
    prefixes = engine._scheduler._rows.prefixes
    engine.close()
    assert prefixes.used_bytes <= blocks * BLOCK_BYTES
    places = [block.place for block in prefixes._blocks.values()]
    assert sorted([*places, *prefixes._free]) == list(range(blocks)), "each place once"


def test_a_long_prompt_is_compared_once(monkeypatch):
    """Each chunk of a prompt is kept when it is prefilled; what was kept of it before is not looked up again."""
    compared, real = [], prefix_cache._tokens
    monkeypatch.setattr(prefix_cache, "_tokens", lambda tokens, index: (compared.append(index), real(tokens, index))[1])
    session, tokens, known = FakeSession(1), [*range(64 * BLOCK)], []
    monkeypatch.setattr(session, "keep", lambda *_: None)
    cache = prefix_cache.PrefixCache(session, 64 * BLOCK_BYTES)
    for count in range(BLOCK // 2, 64 * BLOCK + 1, BLOCK // 2):
        known = cache.keep(0, "", tokens, count, known)
        assert len(known) == count // BLOCK == len(cache._blocks)
    assert len(compared) <= 4 * 64


def test_blocks_that_made_room_for_others_are_kept_anew():
    session, tokens, other = FakeSession(1), LONG[: 2 * BLOCK + 1], LONG[5:]
    cache = prefix_cache.PrefixCache(session, 2 * BLOCK_BYTES)
    known = cache.keep(0, "", tokens, len(tokens), [])
    cache.keep(0, "", other, 2 * BLOCK, [])
    again = cache.keep(0, "", tokens, len(tokens), known)
    assert again[0][0] == known[0][0] and again[1] != known[1] and len(cache._blocks) == 2

"""A prefix cache of engines whose target, or draft model, keeps states: the same text, from the last block with one."""

import random

import pytest
import specstep
from models import save_model
from specstep.runtime.row_states import RowStates

LONG = random.Random(5).choices(range(2, 300), k=150)
ARCHITECTURES = ["Lfm2", "Qwen3_5Text", "Mamba2"]


def engine_of(folder, cache, drafter="ngram", **options):
    return specstep.eager(
        str(folder), dtype="float32", max_batch=2, max_seq_len=256, prefill_chunk=50, drafter=str(drafter), nodes=4,
        prefix_cache_bytes=cache, **options,
    )  # fmt: skip


def ask(engine, prompt):
    result = engine.generate([prompt], 12)[0]
    return result.stats["cached_tokens"], result.token_ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("hybrid") / "model", request.param)


def test_the_text_is_the_same_and_the_prompt_is_prefilled_once(folder):
    plain, engine = engine_of(folder, 0), engine_of(folder, 10**7)
    states = engine._scheduler._rows.prefixes._states
    lengths = ((150, 0), (150, 127), (120, 95), (100, 95), (96, 63), (97, 95), (33, 31), (32, 0), (150, 127))
    for length, cached in lengths:
        got, text = ask(engine, LONG[:length])
        assert (got, text) == (cached, ask(plain, LONG[:length])[1]), length
    other = [*LONG[:70], *LONG[:50]]
    assert ask(engine, other) == (63, ask(plain, other)[1])
    assert ask(engine, other)[0] == 95
    assert engine._scheduler._rows.prefixes.used_bytes >= states.used_bytes > 0


def test_states_of_a_draft_model_go_along(folder):
    plain, engine = engine_of(folder, 0, folder), engine_of(folder, 10**7, folder)
    for cached in (0, 127):
        got = engine.generate([LONG], 12)[0]
        assert got.token_ids == plain.generate([LONG], 12)[0].token_ids
        assert got.stats["cached_tokens"] == cached
        assert set(got.stats["accepted"]) <= {"0", "2", "3", "4"} and got.stats["steps"] < 6, "it is always right"


def test_the_oldest_states_make_room(folder):
    engine = engine_of(folder, 10**7)
    states = engine._scheduler._rows.prefixes._states
    states.most = 3
    for first in (2, 3, 2, 4, 5):
        ask(engine, [first, *LONG[:40]])
    assert len(states._kept) == 3 and states.used_bytes == 3 * states.row_bytes
    assert [ask(engine, [first, *LONG[:40]])[0] for first in (2, 4, 5, 3)] == [31, 31, 31, 0]


def test_states_go_with_their_blocks(folder):
    engine = engine_of(folder, 10**7)
    prefixes = engine._scheduler._rows.prefixes
    ask(engine, LONG[:70])
    assert len(prefixes._states._kept) == 2
    prefixes._free.clear()
    ask(engine, LONG[70:140])
    assert ask(engine, LONG[:70])[0] == 0


def test_a_cache_too_small_for_a_state_is_refused(folder):
    session = engine_of(folder, 0).session
    size = RowStates(session, 10**7, 2).row_bytes
    for parts in (1, 2):
        assert RowStates(session, parts * size, parts).most == 1
        with pytest.raises(specstep.InputError, match=f"prefix_cache_bytes: expected 0, or at least {parts * size}"):
            RowStates(session, parts * size - 1, parts)


def test_states_without_caches_have_all_of_the_budget(tmp_path):
    engine = engine_of(save_model(tmp_path / "model", "Mamba2"), 10**7)
    prefixes = engine._scheduler._rows.prefixes
    states = prefixes._states
    assert prefixes.block_bytes == 0 and states.most == 10**7 // states.row_bytes
    assert ask(engine, LONG)[0] == 0 and ask(engine, LONG)[0] == 127
    assert prefixes.used_bytes == states.used_bytes == len(states._kept) * states.row_bytes
    with pytest.raises(specstep.InputError, match=r"keeps states of \d+ bytes; got 100"):
        engine_of(save_model(tmp_path / "model", "Mamba2"), 100)

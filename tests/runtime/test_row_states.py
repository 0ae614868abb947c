"""A prefix cache of engines whose target, or draft model, keeps states: the same text, from the last block with one."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import specstep
from fake_session import FakeSession
from models import save_model
from specstep.errors import EngineError
from specstep.report import RUNNING, STOPPED
from specstep.runtime import open_directory
from specstep.runtime.asked.request import Request
from specstep.runtime.engine_file import TensorSpec
from specstep.runtime.kv_events import KVEvents
from specstep.runtime.prefix_cache import BLOCK, PrefixCache
from specstep.runtime.row_states import RowStates
from specstep.runtime.session import Session

LONG = random.Random(5).choices(range(2, 300), k=150)
ARCHITECTURES = ["Lfm2", "Qwen3_5Text", "Mamba2", "Rwkv"]


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


def converse(engine, turns=3):
    """A conversation -> what each prompt had in the cache, how much of it is what was said before, and the answers."""
    told, text, said = [], LONG[:40], 0
    for turn in range(turns):
        cached, answer = ask(engine, text)
        told.append((cached, max(said - 1, 0), answer))  # the last token of an answer was not processed
        said, text = len(text) + len(answer), [*text, *answer, LONG[60 + turn]]
    return told


def test_a_conversation_goes_on_from_where_its_answer_ended(folder):
    """Wherever that is in a block. What it goes on from decides the text: another state there changes it."""
    plain, engine, spoilt = (engine_of(folder, cache) for cache in (0, 10**7, 10**7))
    expected = [answer for _, _, answer in converse(plain)]
    told = converse(engine)
    assert [cached for cached, _, _ in told] == [said for _, said, _ in told] and told[1][0] % BLOCK < BLOCK - 1
    assert [answer for _, _, answer in told] == expected
    states = spoilt._scheduler._rows.prefixes._states
    session = spoilt.session
    states.session = SimpleNamespace(spec=session.spec, set=session.set, numpy=lambda *of: 3 - session.numpy(*of))
    told = converse(spoilt)
    assert [answer for _, _, answer in told][1:] != expected[1:]


@pytest.mark.parametrize("checked", [True, False])
def test_a_state_that_a_step_takes_further_is_not_that_of_an_answer(folder, monkeypatch, checked):
    """The host ends a text, as a stop string does, when the next step has begun."""
    plain, engine = engine_of(folder, 0), engine_of(folder, 10**7)
    engine.session.overlaps = True
    output, keep = Request.output, PrefixCache.keep
    answer = plain.generate([LONG[:40]], 30, ignore_eos=True)[0].token_ids
    if not checked:
        monkeypatch.setattr(PrefixCache, "keep", lambda *given: keep(*given[:-1], True))
    with monkeypatch.context() as patch:
        steps = iter([RUNNING, RUNNING, RUNNING, STOPPED])
        patch.setattr(Request, "output", lambda *given: output(*given)._replace(finish=next(steps)))
        ended = engine.generate([LONG[:40]], 30, ignore_eos=True)[0].token_ids
    assert ended == answer[: len(ended)]
    prompt = [*LONG[:40], *ended, LONG[60]]
    cached, text = ask(engine, prompt)
    assert cached == (31 if checked else 39 + len(ended))
    assert (text == ask(plain, prompt)[1]) == checked


def test_states_within_blocks_make_room_and_are_told_to_nobody(tmp_path):
    """Those of a text go ahead of its whole blocks, of which alone a reader of events hears."""
    engine = engine_of(save_model(tmp_path / "model", "Lfm2"), 0)
    events = KVEvents()
    prefixes = engine._scheduler._rows.prefixes = PrefixCache(engine.session, 10**7, events)
    for first in range(2, 6):
        ask(engine, [first, *LONG[:40]])
    sizes = [len(tokens) for _, tokens in prefixes._blocks]
    assert sizes == [32, 21] * 4 and prefixes._ends.total() == 4
    prefixes._free.clear()
    ask(engine, [6, *LONG[:40]])  # takes the places of the first text
    assert [len(tokens) for _, tokens in prefixes._blocks] == sizes and prefixes._ends.total() == 4
    assert [ask(engine, [first, *LONG[:40]])[0] for first in (3, 2)] == [31, 0]
    batches = events.since(0)
    assert {len(block.tokens) for batch in batches for block in batch.stored} == {32}
    assert sum(len(batch.stored) for batch in batches) - sum(len(batch.removed) for batch in batches) == 4


def test_states_of_a_draft_model_go_along(folder):
    plain, engine = engine_of(folder, 0, folder), engine_of(folder, 10**7, folder)
    for cached in (0, 127):
        got = engine.generate([LONG], 12)[0]
        assert got.token_ids == plain.generate([LONG], 12)[0].token_ids
        assert got.stats["cached_tokens"] == cached
        assert set(got.stats["accepted"]) <= {"0", "2", "3", "4"} and got.stats["steps"] < 6, "it is always right"
    text = [*LONG[:40], *engine.generate([LONG[:40]], 12)[0].token_ids, LONG[60]]
    got = engine.generate([text], 12)[0]  # behind the answer, its states would have read that one's last token twice
    assert got.stats["cached_tokens"] == 31 and got.stats["steps"] < 6, "it is always right"


def test_the_oldest_states_make_room(folder):
    engine = engine_of(folder, 10**7)
    states = engine._scheduler._rows.prefixes._states
    states.most = 6  # each text leaves two, that of a block and that at its end
    for first in (2, 3, 2, 4, 5):
        ask(engine, [first, *LONG[:40]])
    assert len(states._kept) == 6 and states.used_bytes == 6 * states.row_bytes
    assert [ask(engine, [first, *LONG[:40]])[0] for first in (2, 4, 5, 3)] == [31, 31, 31, 0]


def test_states_go_with_their_blocks(folder):
    engine = engine_of(folder, 10**7)
    prefixes = engine._scheduler._rows.prefixes
    ask(engine, LONG[:70])
    assert len(prefixes._states._kept) == 3
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


def test_states_that_do_not_fit_in_memory_are_refused(monkeypatch):
    """A row uses all of them, however short it is; caches are taken as they fill."""
    whole, runner = FakeSession(1).spec, SimpleNamespace(open_session=lambda *_: "opened")
    large = TensorSpec("recurrent.0", (8, 32, 128, 128), "float32")
    for recurrent, free in (((), 10**6), (("recurrent.0",), 10**8), (("recurrent.0",), 10**6)):
        given = None, SimpleNamespace(spec=dataclasses.replace(whole, state=(large,), recurrent=recurrent)), None, print
        monkeypatch.setattr(open_directory, "available_memory", lambda free=free: free)
        if recurrent and free < large.nbytes:
            with pytest.raises(
                EngineError, match=r"^memory: expected 0\.02 GB for state .* smaller --max-batch"
            ) as told:
                open_directory._open_session(runner, *given)
            assert "got 0.00 available" in str(told.value)
        else:
            assert open_directory._open_session(runner, *given) == "opened"


def test_a_drafter_whose_states_lack_what_it_left_out_catches_up():
    """With states alone as with caches."""
    for tensors, gaps in ((("seeds",), True), ((), False)):
        session = FakeSession(1)
        Session.__init__(session, dataclasses.replace(session.spec, recurrent=("seeds",), drafter_tensors=tensors))
        assert session._gaps == gaps

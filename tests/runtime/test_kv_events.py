"""The log of a prefix cache: a reader of it knows what the cache has, whenever it comes, and holds nothing up."""

import random

import pytest
from fake_session import FakeSession, alone
from kv_reader import kept
from specstep.errors import InputError
from specstep.runtime.asked.request import Request
from specstep.runtime.engine import Engine
from specstep.runtime.kv_events import KVEvents
from specstep.runtime.prefix_cache import BLOCK

BLOCK_BYTES = BLOCK * 2 * 4  # of the fake session
LONG = [(7 * index + index * index) % 90 for index in range(99)]


def engine_of(blocks=100, rows=2, **options):
    return Engine(FakeSession(rows), None, prefix_cache_bytes=blocks * BLOCK_BYTES, kv_events=True, **options)


def ask(engine, prompt, new_tokens=5, scope=""):
    request = Request(list(prompt), min(100, len(prompt) + new_tokens), [], prefix_scope=scope)
    for _ in engine.run([request]):
        pass
    assert request.tokens == alone(prompt, request.limit)
    return request.cached_tokens


def followed(known, batches):
    """What a reader knows after these: whole texts by hash."""
    for batch in batches:
        for gone in batch.removed:
            del known[gone]
        for block in batch.stored:
            known[block.hash] = (() if block.parent is None else known[block.parent]) + block.tokens
    return known


@pytest.mark.parametrize("blocks", [1, 3, 7, 100])
def test_a_reader_knows_what_the_cache_has(blocks):
    """Of random prompts with common beginnings, in a cache that is soon full."""
    chance, engine, known, read = random.Random(blocks), engine_of(blocks), {}, 0
    for _ in range(60):
        start = chance.choice((0, 0, 3))
        ask(engine, LONG[start : start + chance.randrange(1, 90)], chance.randrange(1, 12), chance.choice(["", "a"]))
        batches = engine.kv_events.since(read)
        known, read = followed(known, batches), read + len(batches)
        assert [batch.number for batch in batches] == [*range(read - len(batches) + 1, read + 1)]
        assert sorted(known.values()) == kept(engine)
        number, everything = engine.kv_events.snapshot()
        assert number == read and {block.hash for block in everything} == set(known)
        assert all(block.parent is None or block.parent in known for block in everything)
    assert read > 10 and len(known) <= blocks


def test_replicas_agree_on_hashes_and_scopes_do_not():
    one, other = engine_of(), engine_of()
    ask(one, LONG[:70])
    ask(other, LONG[5:20])
    ask(other, LONG[:70])
    hashes = [{block.hash for block in engine.kv_events.snapshot()[1]} for engine in (one, other)]
    assert hashes[0] == hashes[1] and len(hashes[0]) == 2
    ask(other, LONG[:70], scope="a")
    assert len({block.hash for block in other.kv_events.snapshot()[1]}) == 4
    assert one.kv_events.run != other.kv_events.run


def test_the_log_is_bounded_and_one_who_fell_behind_is_told():
    events, tokens = KVEvents(most_blocks=8), tuple(range(BLOCK))
    for number in range(100):
        events.stored("", [(number, (number, *tokens[1:]))])
        if number >= 3:
            events.removed([number - 3])
    assert len(events._log) == 8
    last, everything = events.snapshot()
    assert last == 197 and [block.tokens[0] for block in everything] == [97, 98, 99]
    assert events.since(last) == [] and len(events.since(last - 8)) == 8
    assert events.since(last - 9) is None and events.since(0) is None and events.since(last + 1) is None


def test_a_batch_larger_than_the_log_stays_until_the_next():
    events = KVEvents(most_blocks=4)
    events.stored("", [(number, (number,) * BLOCK) for number in range(9)])
    assert [len(batch.stored) for batch in events.since(0)] == [9]
    events.removed([8])
    assert [batch.number for batch in events.since(1)] == [2] and events.since(0) is None


def test_a_store_that_fails_tells_what_made_room_for_it():
    engine = engine_of(blocks=3, rows=1)
    ask(engine, LONG)
    real = engine.session.keep
    engine.session.keep = lambda *given: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(MemoryError):
        ask(engine, LONG[3:90])
    engine.session.keep = real
    known = followed({}, engine.kv_events.since(0))
    assert sorted(known.values()) == kept(engine) and len(known) < 3


def test_nothing_is_told_unless_asked():
    assert Engine(FakeSession(1), None, prefix_cache_bytes=BLOCK_BYTES).kv_events is None
    with pytest.raises(InputError, match="kv_events: expected a prefix cache beside it, got prefix_cache_bytes 0"):
        Engine(FakeSession(1), None, kv_events=True)

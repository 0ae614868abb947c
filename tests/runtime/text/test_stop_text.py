"""Where an output ends: stop strings, stop ids, the end of the sequence, fewest and most tokens. Text, ids, logprobs
and usage end at the same token, and nothing past it is shown."""

import itertools
import threading
import time

import pytest
import specstep
from fake_session import FakeSession, logprob_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep.report import LOGPROB_STEPS
from specstep.runtime.engine import Engine
from specstep.runtime.text.stop_text import StopText
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import Tokenizer, decoders, models

TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
VOCABULARY, EOS, PROMPT = 258, 1, [2, 3, 4]
HALF = "\ufffd"
PATIENCE = 30  # seconds after which a wait is taken for a hang


def letters():
    """A tokenizer whose tokens are pieces of several characters, and bytes of "é"."""
    pieces = ["".join(some) for size in (1, 2, 3) for some in itertools.product("ab.", repeat=size)]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: at for at, piece in enumerate(["<s>", *pieces, "Ã", "©"])}, merges=[])
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.ByteLevel()
    return EngineTokenizer(tokenizer, None, {})


LETTERS = letters()


def whole(tokenizer, tokens):
    """The text of tokens, without the character that is not complete."""
    return tokenizer.decode(tokens).rstrip(HALF)


def ended(before, text, strings):
    """Where the stop string begins that ends first in the part of a text that is new, None without one."""
    places = [(at + len(s), at) for s in strings for at in range(len(text)) if text.startswith(s, at)]
    places = [(end, at) for end, at in places if end > len(before)]
    return min(places)[1] if places else None


def plain(tokens, strings, stop_ids=(), least=0, most=10**9, tokenizer=TEXT):
    """Decoding one token after the other, by the rules -> ids, text, finish reason."""
    ids = []
    for token in tokens:
        while token in stop_ids and len(ids) < least:
            token += 1
        before = whole(tokenizer, ids)
        ids.append(token)
        last = token in stop_ids or len(ids) == most
        text = tokenizer.decode(ids) if last else whole(tokenizer, ids)
        at = ended(before, text, strings) if len(ids) > least else None
        if at is not None:
            return ids, text[:at], "stop"
        if last:
            return ids, text, "stop" if token in stop_ids else "length"
    raise AssertionError("the script is too short")


class Script:
    """A session that writes a given text, and accepts so many drafts in each step."""

    def __init__(self):
        self.tokens, self.accepts = [], 0
        session = FakeSession(
            1,
            follow=lambda tokens: (self.tokens + [40] * 100)[max(0, len(tokens) - len(PROMPT))],
            accepts=lambda step, row: self.accepts,
            depth=4,
            vocabulary=VOCABULARY,
            stops=(EOS,),
        )
        self.engine = Engine(session, TEXT)


@pytest.fixture(scope="module")
def script():
    with (made := Script()).engine:
        yield made


STRINGS = {
    "none": [],
    "one": ["END"],
    "across": ["D mo"],
    "inside another": ["at.", "cat", "he cat. E"],
    "wide": ["é"],
    "never": ["nothing like it"],
    "one token": ["."],
}


@pytest.mark.parametrize("most", [3, 17, 60])
@pytest.mark.parametrize("least", [0, 8, 14])
@pytest.mark.parametrize("stops", ["no ids", "eos", "ids", "ids in front"])
@pytest.mark.parametrize("strings", STRINGS.values(), ids=STRINGS)
def test_all_ends_at_one_token(strings, stops, least, most, script):
    if least > most:
        return
    ids = {"ids": [TEXT.encode("D")[0], 9], "ids in front": TEXT.encode("c")}.get(stops, [])
    for accepts in (0, 1, 4):
        for shift in range(accepts + 1):  # so that each place of an accepted run comes to be the last
            tail = [EOS, *TEXT.encode("?!")] if stops == "eos" else []
            script.tokens = TEXT.encode("x" * shift + "the cat. END") + tail + TEXT.encode(" more é and é" + "." * 40)
            script.accepts = accepts
            check(script.engine, plain(script.tokens, strings, [EOS, *ids], least, most), strings, ids, least, most)


def check(engine, expected, strings, ids, least, most):
    tokens, text, _ = expected
    sampling = {"stop": strings, "min_new_tokens": least, "logprobs": 2}
    stream = engine.submit(engine.request(PROMPT, most, stop_ids=ids, sampling=sampling))
    pieces, shown = [], ""
    for piece in stream:
        pieces.append(piece)
        shown += piece.text
        assert text.startswith(shown), "something past the end was shown"
    result = stream.result()
    assert (result.token_ids, result.text, result.finish_reason) == expected
    assert shown == text and [token for piece in pieces for token in piece.token_ids] == tokens
    assert result.logprobs == [each for piece in pieces for each in piece.logprobs]
    assert [each.token_id for each in result.logprobs] == tokens
    assert [each.logprob for each in result.logprobs] == [logprob_of(token) / LOGPROB_STEPS for token in tokens]
    assert all(len(each.top) == 2 for each in result.logprobs)
    assert result.stats["new_tokens"] == len(tokens)
    sampling.pop("logprobs")
    again = engine.generate(PROMPT, most, stop_ids=ids, sampling=sampling)
    assert (again.token_ids, again.text, again.finish_reason, again.logprobs) == (*expected, None)


runs = st.lists(st.integers(0, 5), max_size=30)
stop_strings = st.lists(st.text("ab.é", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300)
@given(st.lists(st.integers(0, len(LETTERS.tokenizer.get_vocab()) - 1), min_size=1, max_size=25), runs, stop_strings,
       st.integers(0, 8))  # fmt: skip
def test_streams_hold_back_what_may_become_a_stop_string(tokens, sizes, strings, least):
    expected, text, reason = plain(tokens, strings, (), least, len(tokens), LETTERS)
    stream, kept, shown, start = StopText(LETTERS, strings, least), [], "", 0
    for size in [*sizes, len(tokens)]:
        some = tokens[start : start + size]
        kept += some[: stream.push(some, last=start + size >= len(tokens))]
        start += size
        shown += stream.take()
        assert text.startswith(shown)
        if stream.found or start >= len(tokens):
            break
    assert stream.found == (reason == "stop")
    assert kept == expected and shown + stream.open == text


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(LETTERS.tokenizer.get_vocab()) - 1), min_size=1, max_size=25), stop_strings, runs)
def test_what_is_held_back_is_no_more_than_may_become_a_stop_string(tokens, strings, sizes):
    stream, shown = StopText(LETTERS, strings), ""
    for count, token in enumerate(tokens, 1):
        stream.push([token])
        shown += stream.take()
        if stream.found:
            return
        rest = whole(LETTERS, tokens[:count])[len(shown) :]
        assert not rest or any(string.startswith(rest) and string != rest for string in strings)


def test_tokens_of_several_stop_strings_count_by_where_they_end():
    stream = StopText(LETTERS, ["b.", "ab.", "a.a"])
    token = LETTERS.tokenizer.token_to_id
    assert stream.push([token("bba"), token("b.a"), token("a")]) == 2
    assert stream.found and stream.take() + stream.open == "bb"


def test_a_character_that_never_ends_hides_no_text_before_it():
    """ "ab" and half an "é" in one run: the stop string is complete with its own token."""
    stream, token = StopText(LETTERS, ["ab"]), LETTERS.tokenizer.token_to_id
    assert stream.push([token("a"), token("b"), token("Ã"), token("a")]) == 2
    assert stream.take() + stream.open == ""


def until_idle(engine):
    """Wait until the worker has done all."""
    ends = time.monotonic() + PATIENCE
    while engine._scheduler._worker is not None and time.monotonic() < ends:
        time.sleep(0.001)


def test_a_stop_string_ends_the_row_of_a_stream_that_nobody_reads(script):
    script.tokens, script.accepts = TEXT.encode("the cat. END" + "." * 60), 1
    before = script.engine.session.steps
    stream = script.engine.submit(script.engine.request(PROMPT, 90, sampling={"stop": ["cat"]}))
    until_idle(script.engine)
    assert script.engine.session.steps - before <= 5
    assert stream.result().text == "the "


@pytest.fixture
def patient(script, monkeypatch):
    """`patient(request, steps)`: so many steps from here, the worker waits until the request has ended."""
    session, gates = script.engine.session, []

    def begin_step(*given, real=session.begin_step):
        for request, at in gates:
            ends = time.monotonic() + PATIENCE
            while session.steps >= at and request.finish_reason is None and time.monotonic() < ends:
                time.sleep(0.001)
        return real(*given)

    monkeypatch.setattr(session, "begin_step", begin_step)
    return lambda request, steps: gates.append((request, session.steps + steps))


def test_one_request_ends_alone_and_gives_its_row_to_the_next(script, patient):
    """One row: the first request ends at its stop string long before its limit."""
    script.tokens, script.accepts = TEXT.encode("one stop. two" * 8), 4
    engine = script.engine
    first = engine.request(PROMPT, 90, sampling={"stop": "stop"})
    second, third = engine.request(PROMPT, 90), engine.request(PROMPT, 5)
    before = engine.session.steps
    patient(first, 3)
    with engine.run([first, second, third]) as running:
        for _ in running:
            pass
    assert (first.finish_reason, len(first.tokens)) == ("stop", 8)
    assert second.tokens == TEXT.encode("one stop. two" * 8)[:90] and third.tokens == second.tokens[:5]
    assert second.finish_reason == third.finish_reason == "length"
    assert engine.result(first).text == "one "
    assert engine.session.steps - before <= 4 + 90 / 5 + 3, "the row went on"


def test_an_ended_request_frees_its_row_though_its_submission_is_not_read_on(script, patient):
    script.tokens, script.accepts = TEXT.encode("one stop. two" * 8), 4
    engine = script.engine
    stopped, other = engine.request(PROMPT, 90, sampling={"stop": "stop"}), engine.request(PROMPT, 90)
    patient(stopped, 3)
    before = engine.session.steps
    running = engine.run([stopped, other])
    while stopped.finish_reason is None:
        next(running)
    until_idle(engine)
    assert engine.session.steps - before <= 4 + 90 / 5 + 1, "the row went on"
    assert [request is other for request, _ in running] == [True] * 19


def test_what_the_worker_sent_past_the_stop_is_dropped(script):
    """A slow reader: the worker has stepped on when the stop string is read."""
    script.tokens, script.accepts = TEXT.encode("stop and go on" + "." * 80), 1
    request, other = (script.engine.request(PROMPT, 60, sampling={"stop": s}) for s in ("p a", "never"))
    running = script.engine.run([request, other])
    until_idle(script.engine)
    told = [(one is request, list(tokens)) for one, tokens in running]
    assert [token for mine, tokens in told if mine for token in tokens] == request.tokens == TEXT.encode("stop a")
    assert other.tokens == script.tokens[:60] and other.finish_reason == "length"


def test_a_cancelled_stream_keeps_all_of_its_text(script):
    script.tokens, script.accepts = TEXT.encode("almost a stop string"), 0
    stream = script.engine.submit(script.engine.request(PROMPT, 90, sampling={"stop": "a strange thing"}))
    shown = "".join(next(stream).text for _ in range(len("almost a st")))
    stream.cancel()
    result = stream.result()
    assert shown == "almost " and (result.text, result.finish_reason) == ("almost a st", "cancelled")


def test_cancelling_from_another_thread_while_a_stop_string_is_looked_for(script):
    script.tokens, script.accepts = TEXT.encode("ab" * 40), 1
    for _ in range(20):
        stream = script.engine.submit(script.engine.request(PROMPT, 80, sampling={"stop": "ba" * 12}))
        canceller = threading.Thread(target=stream.cancel)
        canceller.start()
        result = stream.result()
        canceller.join()
        assert result.finish_reason in ("stop", "cancelled")
        assert TEXT.decode(result.token_ids).startswith(result.text)


def test_stop_strings_need_a_tokenizer():
    error = "^stop: expected an engine with a tokenizer, got one without; give stop_ids$"
    with Engine(FakeSession(1), None) as engine, pytest.raises(specstep.InputError, match=error):
        engine.generate([5], 4, sampling={"stop": "x"})

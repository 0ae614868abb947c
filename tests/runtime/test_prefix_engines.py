"""Real engines say the same with kept prefixes as without: tokens, text, log-probabilities, and what is drafted."""

import threading

import numpy as np
import pytest
import specstep
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specstep.runtime.engine import Engine
from specstep.runtime.inductor.aoti import LoadedProgram
from specstep.runtime.inductor.torch_session import TorchSession
from specstep.runtime.onnx import OnnxSession
from specstep.runtime.prefix_cache import BLOCK

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "logprobs": 3}
TURNS = ["hello, who are you and what do you do all day long?", "and then? tell me more of it, please", "why", "so"]
# torch's and ONNX Runtime's sums of float32 depend on how many tokens are computed at once; those of engines do not.
LOGPROB_ERROR, CACHE_ERROR = 2e-5, 5e-5


@pytest.fixture(
    scope="module",
    params=[
        "none",
        "ngram",
        pytest.param("draft model", marks=pytest.mark.slow),
        pytest.param("eagle3", marks=pytest.mark.slow),
        "ngram,eagle3",
        "published",
        "onnx",
        "inductor",
        pytest.param("onnx eagle3", marks=pytest.mark.slow),
    ],
)
def engines(request, model_folder, drafter_folder, head_folder, published_heads):
    """An engine, and one with the same programs that keeps prefixes."""
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
    head = str(head_folder)
    names = {
        "draft model": str(drafter_folder),
        "eagle3": head,
        "ngram,eagle3": f"ngram,{head}",
        "published": published_heads,
    }
    folders = {"onnx": "onnx_folder", "onnx eagle3": "onnx_head_folder", "inductor": "engine_folder"}
    if request.param in folders:
        plain = specstep.load(request.getfixturevalue(folders[request.param]), nodes="all")
    else:
        plain = specstep.eager(str(model_folder), drafter=names.get(request.param, request.param), **options)
    plain.learning = False  # what one learned the other has not
    return plain, keeping(plain, 1 << 22)


def keeping(engine, budget, **options):
    """An engine over another session of the same programs."""
    session = engine.session
    if isinstance(session, TorchSession):
        other = TorchSession(session.spec, session._prefill, session.step_program)
    else:
        other = OnnxSession(session.spec, session._prefill, session._step)
    return Engine(other, engine.text, prefix_cache_bytes=budget, learning=engine.learning, **options)


def is_exact(engine):
    """Whether it is one of the default backend: bit for bit the same."""
    return isinstance(getattr(engine.session, "step_program", None), LoadedProgram)


def same(ours, theirs, exact):
    """All that users see, and the drafts."""
    for one, other in zip(ours.choices, theirs.choices, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.stats["accepted"] == other.stats["accepted"], "other drafts"
        for mine, its in zip(one.logprobs or [], other.logprobs or [], strict=True):
            assert abs(mine.logprob - its.logprob) <= (0 if exact else LOGPROB_ERROR)
            assert mine.token_id == its.token_id


@pytest.mark.parametrize("sampling", [None, SAMPLED])
def test_a_conversation(sampling, engines):
    """Turn after turn, with the answers in it: only the last turn is prefilled, and what is left of a block."""
    plain, keeps = engines
    tokens, before = [], 0
    for text in TURNS:
        tokens += plain.tokenizer.encode(text)
        got = keeps.generate(tokens, 20, ignore_eos=True, sampling=sampling, prefix_scope=str(sampling))
        same(got, plain.generate(tokens, 20, ignore_eos=True, sampling=sampling), is_exact(plain))
        cached = got.stats["cached_tokens"]
        assert cached == max(0, min(before // BLOCK * BLOCK, len(tokens) - 1) - 1)
        tokens = tokens + got.token_ids
        before = len(tokens)
    assert cached > 120


def test_the_caches_hold_the_same(engines):
    """Those of the drafter too: all slots ahead of the root."""
    plain, keeps = engines
    exact = is_exact(plain)
    prompt, other = list(range(30, 110)), [*range(30, 94), *range(200, 216)]
    for engine in (plain, keeps):
        engine.generate(other, 12, ignore_eos=True)
    for tokens, cached in ((prompt, 63), (prompt, 63), (prompt[:64], 62)):
        got = keeps.generate(tokens, 12, ignore_eos=True)
        same(got, plain.generate(tokens, 12, ignore_eos=True), exact)
        assert got.stats["cached_tokens"] == cached
        length = len(tokens) + 11
        theirs, ours = (engine.session.read(1, 128) for engine in (plain, keeps))
        for name in (tensor.name for tensor in plain.spec.caches):
            ahead = [tensors[name][:, :, :length] for tensors in (theirs, ours)]
            np.testing.assert_allclose(*ahead, rtol=0, atol=0 if exact else CACHE_ERROR, err_msg=name)


def test_choices_and_identical_prompts(engines):
    plain, keeps = engines
    text, sampling = "one two three four five six seven", SAMPLED | {"n": 3}
    got = keeps.generate([text, text], 9, ignore_eos=True, sampling=sampling, prefix_scope="choices")
    for ours, theirs in zip(got, plain.generate([text, text], 9, ignore_eos=True, sampling=sampling), strict=True):
        same(ours, theirs, is_exact(plain))
    counts = [choice.stats["cached_tokens"] for each in got for choice in each.choices]
    assert counts[0] == 0 and min(counts[1:]) == 31


@pytest.fixture(scope="module")
def small(model_folder, head_folder):
    """An engine with a head, and what it says alone."""
    options = {"drafter": str(head_folder), "dtype": "float32", "max_batch": 3, "max_seq_len": 128, "prefill_chunk": 16}
    engine, answers = specstep.eager(str(model_folder), **options), {}

    def alone(prompt, count):
        if (tuple(prompt), count) not in answers:
            answers[tuple(prompt), count] = engine.generate(prompt, count, ignore_eos=True).token_ids
        return answers[tuple(prompt), count]

    return engine, alone


tails = st.lists(st.integers(40, 41), min_size=1, max_size=40)
asked = st.tuples(st.integers(0, 2), tails, st.sampled_from([1, 9, 20]), st.sampled_from([None, None, 0, 2]))


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(asked, min_size=2, max_size=7), st.sampled_from([3, 40]), st.sampled_from([None, 5]))
def test_random_prompts_with_random_joins_and_leaves(small, visits, blocks, most):
    """More than rows, of two tokens behind common beginnings; some leave in the middle, a thread each."""
    plain, alone = small
    size = 32 * sum(tensor.shape[1] * tensor.shape[3] * 4 for tensor in plain.spec.caches)
    engine, failures = keeping(plain, blocks * size, prefill_per_step=most), []

    def visit(beginning, tail, count, leaves):
        prompt = [[], [40] * 33, [41, 40] * 34][beginning] + tail
        try:
            with engine.submit(engine.request(prompt, count, ignore_eos=True)) as stream:
                tokens = []
                for number, piece in enumerate(stream):
                    tokens += piece.token_ids
                    if number == leaves:
                        break
            expected = alone(prompt, count)
            assert tokens == (expected if leaves is None else expected[: len(tokens)])
        except BaseException as error:
            failures.append(error)

    for one in visits:  # known before others use the session beside them
        alone([[], [40] * 33, [41, 40] * 34][one[0]] + one[1], one[2])
    threads = [threading.Thread(target=visit, args=one) for one in visits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    engine.close()
    assert not failures, failures

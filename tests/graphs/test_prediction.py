"""Predicted text: where in it an answer is, against a plain search; the steps that it saves; and no token that it
changes."""

import random

import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_eagle3, save_model
from specstep.kernels.ngram.reference import follow_prediction

TRUST = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
tokens = st.integers(0, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(tokens, max_size=12), st.integers(0, 3), st.lists(tokens, min_size=4, max_size=4), st.integers(0, 20))
def test_places_are_those_of_a_plain_search(prediction, behind, context, expected):
    slots = torch.tensor([[*prediction, *[0] * behind, 0]])  # what lies behind is not looked at
    place, token, weight = follow_prediction(
        slots, torch.tensor([len(prediction)]), torch.tensor([[context]]), torch.tensor([[expected]]), TRUST
    )
    found = [(0, 0, expected)] * (expected < len(prediction))
    for at in range(1, len(prediction)):
        length = 0
        while length < min(at, 4) and prediction[at - 1 - length] == context[3 - length]:
            length += 1
        if length:
            found.append((length, -abs(at - min(expected, slots.shape[1])), at))
    if not found:
        assert (place.item(), token.item(), weight.item()) == (expected, -1, 0)
    else:
        length, _, at = max(found)
        assert (place.item(), token.item(), weight.item()) == (at, prediction[at], TRUST[length])


@pytest.fixture(scope="module", params=["ngram", "merged"])
def engine(request, tmp_path_factory):
    """Eager, 15 nodes."""
    folder = save_model(tmp_path_factory.mktemp("model") / "model", max_position_embeddings=1100)
    drafter = "ngram"
    if request.param == "merged":
        drafter += f",{save_eagle3(folder.parent / 'head')}"
    options = {"dtype": "float32", "nodes": 15, "max_seq_len": 640, "max_batch": 2, "prefill_chunk": 16}
    with specstep.eager(str(folder), drafter=drafter, **options) as engine:
        yield engine


def edited(answer, edits):
    """An answer with tokens replaced, added and left out: what was predicted of it."""
    changed = list(answer)
    for at, kind in sorted(edits, reverse=True):
        changed[at : at + (kind != "added")] = (
            [] if kind == "left out" else [(answer[at] + 5) % 320, 7][: 1 + (kind == "added")]
        )
    return changed


SAMPLING = {"temperature": 1.5, "seed": 4}
EDITS = [(60, "replaced"), (200, "added"), (400, "left out")]


def test_an_answer_that_repeats_takes_a_step_for_five_tokens(engine):
    """Sampled, so that nothing but the prediction tells what comes."""
    plain = engine.generate([5, 9, 17], 500, sampling=SAMPLING, ignore_eos=True)
    assert plain.stats["steps"] > 300
    result = engine.generate(
        [5, 9, 17], 500, sampling=SAMPLING, ignore_eos=True, prediction=edited(plain.token_ids, EDITS)
    )
    assert result.token_ids == plain.token_ids
    print(result.stats)
    assert result.stats["steps"] <= 100
    assert result.stats["rejected_prediction_tokens"] <= 8


@pytest.mark.parametrize("sampling", [None, SAMPLING])
def test_a_wrong_prediction_changes_no_token(engine, sampling):
    generator = random.Random(2)
    prompts = [[3, 4, 5] * 8, [8]]
    plain = engine.generate(prompts, 60, sampling=sampling, ignore_eos=True)
    for prediction in (
        [generator.randrange(320) for _ in range(300)],
        [5],
        [plain[0].token_ids[::-1], plain[0].token_ids],
    ):
        wrong = engine.generate(prompts, 60, sampling=sampling, ignore_eos=True, prediction=prediction)
        assert [each.token_ids for each in wrong] == [each.token_ids for each in plain]

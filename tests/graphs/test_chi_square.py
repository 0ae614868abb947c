"""Sampling is right: three tokens from the real step, against every text's probability, by transformers in float64.

Each case comes with wrong rules, which must fail the same test. That drafts change nothing is test_sampled_step.py's.
"""

from itertools import product

import pytest
import torch
from chi_square import LEAST, p_value
from plain_sampling import Asked, written
from specstep.graphs import choice as module
from specstep.graphs.drafters.drafter import Drafter
from specstep.graphs.drafters.none import NoDraft
from specstep.graphs.state import row_state
from specstep.graphs.step import SpeculativeStep
from specstep.graphs.tree import chain
from specstep.kernels.choose import reference
from specstep.report import RUNNING

VOCABULARY, LENGTH, ROWS = 5, 3, 2**14
ENDED = VOCABULARY  # stands for the tokens after a stop
PROMPT = [2, 4, 2, 0]
TABLE = 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(12))


class TableTarget(torch.nn.Module):
    """A bigram model."""

    layers = 0

    def forward(self, tokens, where, keys, values):
        return TABLE[tokens], None


def texts(asked, **changes):
    """A text of three tokens for each of neighbouring seeds, all from the step: [ROWS, 3]."""
    declared = row_state(len(PROMPT) + LENGTH, 0, VOCABULARY)
    short = {"bias_ids": (8,), "bias": (8,), "banned_words": (4, 8)}  # rows are many here
    state = {name: torch.full((ROWS, *short.get(name, t.shape)), t.fill, dtype=t.dtype) for name, t in declared.items()}
    state["history"][:, : len(PROMPT)] = torch.tensor(PROMPT)
    state["lengths"][:], state["prompt_lengths"][:] = len(PROMPT) - 1, len(PROMPT)
    state["limits"][:], state["finish"][:] = len(PROMPT) + LENGTH, RUNNING
    given = asked.controls(len(PROMPT)) | {"stop_ids": asked.stop_ids} | changes
    first = {name: tensor[:1].clone() for name, tensor in state.items()}
    written(first, 0, given)
    state |= {name: first[name].expand_as(state[name]).clone() for name in given}
    state["seeds"] = asked.seed + torch.arange(ROWS)
    step, cache = SpeculativeStep(TableTarget(), Drafter(NoDraft(), chain(0))), [torch.zeros(1, 1, 64, 1)]
    for _ in range(LENGTH):
        state |= step(torch.arange(1), state, cache, cache)[1]
    place = torch.arange(LENGTH)
    there = place < (state["lengths"] + 1 - len(PROMPT))[:, None]
    return state["history"][:, len(PROMPT) :].where(there, ENDED)


def counted(found):
    """How often each text comes: [V + 1] * tokens counts."""
    length = found.shape[1]
    cells = (found * (VOCABULARY + 1) ** (length - 1 - torch.arange(length))).sum(1)
    return torch.bincount(cells, minlength=(VOCABULARY + 1) ** length)


def sampled(asked, **changes):
    return counted(texts(asked, **changes))


def enumerated(asked):
    """The probability of each text."""
    found = torch.zeros((VOCABULARY + 1,) * LENGTH, dtype=torch.float64)
    known = {}  # the next token's probabilities, by the text so far
    for text in product(range(VOCABULARY + 1), repeat=LENGTH):
        share = 1.0
        for place, token in enumerate(text):
            before = text[:place]
            if before and before[-1] in (*asked.stop_ids, ENDED):
                share *= token == ENDED
                continue
            if before not in known:
                tokens = [*PROMPT, *before]
                scores = asked.scores(len(PROMPT), tokens, TABLE[tokens[-1]].double())
                known[before] = [*scores.softmax(0).tolist(), 0.0]
            share *= known[before][token]
            if not share:
                break
        found[text] = share
    return found


# Wrong rules: what is put in the place of a part of the reference.


def with_noise(change):
    right = reference.gumbel
    return {"gumbel": lambda *given: right(*change(*given))}


def with_limits(change):
    right = reference.filtered
    return {"filtered": lambda scaled, sampling: right(*change(scaled, sampling.clone()))}


def with_penalties(change):
    right = reference._penalized
    return {"_penalized": lambda x, counts, tokens, *rest: right(x, change(*counts, tokens), tokens, *rest)}


def moved(column, by):
    """A column of the limits is off by so much."""

    def change(scaled, sampling):
        sampling[:, column] += by
        return scaled, sampling

    return change


def filtered_ahead_of_the_temperature():
    def wrong(scaled, sampling):
        heat = sampling[:, 0, None, None]
        return RIGHT["filtered"](scaled * heat, sampling) / heat

    return {"filtered": wrong}


def top_p_without_the_token_that_crosses():
    def wrong(scaled, sampling):
        order = scaled.softmax(-1).sort(-1, descending=True)
        kept = (order.values.cumsum(-1) <= sampling[:, 2, None, None]) | (torch.arange(VOCABULARY) == 0)
        return scaled.where(torch.zeros_like(kept).scatter(-1, order.indices, kept), -torch.inf)

    return {"filtered": wrong}


def biased_after(name):
    """The bias comes in after the penalties."""
    held = []
    right = RIGHT[name]

    def keep(x, bias_ids, bias):
        held[:] = [bias_ids, bias]
        return x

    return {"_biased": keep, name: lambda *given: RIGHT["_biased"](right(*given), *held)}


RIGHT = {name: getattr(reference, name) for name in ("filtered", "_biased", "_penalized", "gumbel")}
ROOT = torch.arange(VOCABULARY)
CASES = {
    "temperature": (
        Asked(temperature=0.7),
        [
            with_noise(lambda seeds, positions, tokens: (seeds, positions * 0, tokens)),
            with_noise(lambda seeds, positions, tokens: (seeds * 0, positions, tokens)),
            with_noise(lambda seeds, positions, tokens: (seeds, positions, tokens // 2)),
            with_limits(lambda scaled, sampling: (scaled * 1.3, sampling)),
        ],
    ),
    "hot": (Asked(temperature=2.5, seed=10**6), [with_limits(lambda scaled, sampling: (scaled / 1.5, sampling))]),
    "top_k": (Asked(temperature=1, top_k=3, seed=2**40), [with_limits(moved(1, 1)), with_limits(moved(1, -1))]),
    "top_p": (
        Asked(temperature=1, top_p=0.8, seed=7),
        [top_p_without_the_token_that_crosses(), with_limits(moved(2, 0.1))],
    ),
    "min_p": (
        Asked(temperature=1, min_p=0.2, seed=9),
        [with_limits(moved(3, 0.1)), {"filtered": lambda x, s: x.where(x.softmax(-1) >= 0.2, -torch.inf)}],
    ),
    "all filters": (
        Asked(temperature=1.6, top_k=4, top_p=0.85, min_p=0.15, seed=2),
        [filtered_ahead_of_the_temperature(), with_limits(moved(2, 0.1))],
    ),
    "repetition": (
        Asked(temperature=1, repetition_penalty=1.6, seed=3),
        [
            with_penalties(lambda every, output, tokens: (every - (tokens == ROOT).float(), output)),
            with_penalties(lambda every, output, tokens: (output, output)),
        ],
    ),
    "presence": (
        Asked(temperature=1, presence_penalty=0.9, seed=4),
        [
            with_penalties(lambda every, output, tokens: (every, every)),
            with_penalties(lambda every, output, tokens: (every, output - (tokens == ROOT).float())),
        ],
    ),
    "frequency": (
        Asked(temperature=1, frequency_penalty=-0.9, seed=5),
        [
            with_penalties(lambda every, output, tokens: (every, output.clamp(max=1))),
            with_penalties(lambda every, output, tokens: (every, every)),
        ],
    ),
    "bias": (
        Asked(temperature=0.6, bias={1: 1.5, 3: -2.0}, seed=6),
        [biased_after("filtered"), {"_biased": lambda x, ids, bias: x}],
    ),
    "bias and repetition": (
        Asked(temperature=1, bias={2: 2.5, 4: -1.5}, repetition_penalty=2.0, seed=8),
        [biased_after("_penalized")],
    ),
    "bans": (
        Asked(temperature=1, suppressed=[3], bad_words=[[0, 1], [2, 0, 4], [4, 2, 0, 2], [1]], seed=11),
        [{"_without": lambda x, banned, allowed, masked: x}],
    ),
    "stops": (Asked(temperature=1, stop_ids=[1, 4], min_new_tokens=1, seed=12), []),
    "everything": (
        Asked(
            temperature=1.3, top_k=4, top_p=0.93, min_p=0.04, repetition_penalty=1.2, presence_penalty=0.3,
            frequency_penalty=0.2, bias={1: 0.7}, bad_words=[[2, 0], [0, 3]], min_new_tokens=2, stop_ids=[4], seed=13,
        ),
        [
            filtered_ahead_of_the_temperature(),
            with_penalties(lambda every, output, tokens: (every, every)),
            with_noise(lambda seeds, positions, tokens: (seeds, positions // 2, tokens)),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_texts_come_as_often_as_they_should(name, monkeypatch):
    asked, wrong_rules = CASES[name]
    expected = enumerated(asked)
    assert abs(expected.sum().item() - 1) < 1e-12
    assert p_value(sampled(asked), expected) > LEAST
    monkeypatch.setattr(module, "choose", reference.choose)
    for rule in wrong_rules:
        with monkeypatch.context() as patch:
            for part, wrong in rule.items():
                patch.setattr(reference, part, wrong)
            assert p_value(sampled(asked), expected) < LEAST, wrong_rules.index(rule)


def test_rows_of_neighbouring_seeds_are_independent(monkeypatch):
    """A row's second token, and the first one of the row beside it."""
    asked = Asked(temperature=1.2, seed=15)
    expected = enumerated(asked)
    pairs = expected.sum((0, 2))[:, None] * expected.sum((1, 2))

    def p_of_pairs():
        found = texts(asked)
        return p_value(counted(torch.stack([found[0::2, 1], found[1::2, 0]], 1)), pairs)

    assert p_of_pairs() > LEAST
    monkeypatch.setattr(module, "choose", reference.choose)
    summed = with_noise(lambda seeds, positions, tokens: (seeds + positions, positions * 0, tokens))
    monkeypatch.setattr(reference, "gumbel", summed["gumbel"])
    assert p_of_pairs() < LEAST


@pytest.mark.parametrize("by", [-1, 1])
def test_a_row_that_may_stop_too_early_or_too_late_is_seen(by):
    asked = CASES["stops"][0]
    changed = sampled(asked, min_lengths=len(PROMPT) + asked.min_new_tokens + by)
    assert p_value(changed, enumerated(asked)) < LEAST


def test_a_masked_row_samples_from_what_is_allowed():
    asked = Asked(temperature=0.8, seed=14)
    allowed = Asked(temperature=0.8, suppressed=[0, 3])
    got = sampled(asked, masked=1, allowed=[[0b10110]])
    assert p_value(got, enumerated(allowed)) > LEAST
    assert p_value(got, enumerated(asked)) < LEAST

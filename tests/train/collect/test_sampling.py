"""Sampled answers: cold ones against transformers' greedy ones, warm ones against the probabilities."""

from collections import Counter

import pytest
import torch
from models import greedy
from specstep.compile.source import load_source
from specstep.train.collect.sampling import draw, sample


def test_a_cold_sample_is_the_greedy_answer_of_each_row(model_folder):
    """Rows of different lengths and limits, some stopped early, in one left-padded batch."""
    source = load_source(str(model_folder), "float32", "cpu")
    prompts = [[5, 9, 30, 7], [88], [12, 13, 14, 15, 16, 17, 18, 19, 20]]
    free = [greedy(source.model, prompt, 12) for prompt in prompts]
    stop = free[0][3]
    limits = [12, 5, 12]
    got = sample(source, prompts, limits, temperatures=[1e-4] * 3, stop_ids=[stop])
    for tokens, row, limit in zip(got, free, limits, strict=True):
        end = row.index(stop) + 1 if stop in row else len(row)
        assert tokens == row[: min(end, limit)]


def test_draws_follow_the_probabilities_inside_the_nucleus():
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    generator = torch.Generator().manual_seed(0)
    drawn = draw(shares.log().expand(20000, -1), 0.9, generator).tolist()
    counts = Counter(drawn)
    assert set(counts) == {0, 1, 2}
    for token in range(3):
        assert counts[token] / 20000 == pytest.approx(float(shares[token]) / 0.95, abs=0.02)

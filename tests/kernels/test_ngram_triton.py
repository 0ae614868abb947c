"""The GPU's n-gram kernel against the reference."""

from typing import Any

import pytest
import torch
from ngram_case import VOCABULARY, agrees, random_learned, random_tables
from specstep.kernels.ngram.reference import ngram as reference

pytest.importorskip("triton")

pytestmark = pytest.mark.parametrize(
    "backend", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
CASES = [  # slots, predicted, longest match, matches, top k
    (1, 0, 2, 1, 1), (16, 17, 3, 3, 4), (130, 1, 4, 4, 9), (64, 130, 5, 6, 3), (700, 600, 4, 4, 8),
]  # fmt: skip


@pytest.mark.parametrize(("with_tables", "with_learned"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("slots", "predicted", "longest", "matches", "top_k"), CASES)
def test_random_levels(
    backend: Any,
    slots: int,
    predicted: int,
    longest: int,
    matches: int,
    top_k: int,
    with_tables: bool,
    with_learned: bool,
) -> None:
    batch, width = 3, 2
    generator = torch.Generator().manual_seed(slots)
    history = torch.randint(0, VOCABULARY, (batch, slots + 3), generator=generator)[:, :slots]  # a view
    lengths = torch.tensor([0, slots - 1, slots // 2])
    context = torch.randint(0, VOCABULARY, (batch, width, longest), generator=generator)
    context[0, 0, : longest - 1] = -2  # nothing before
    concentrations = torch.rand(longest, generator=generator) * 9 + 0.1
    concentrations[1] = 0  # left out
    prediction = torch.randint(0, VOCABULARY, (batch, predicted + 3), generator=generator)[:, : max(predicted, 1)]
    counts = torch.tensor([predicted, 0, predicted + 2])  # more than there are slots
    expected = torch.randint(0, 2 * predicted + 3, (batch, width), generator=generator)
    trust = torch.rand(longest + 1, generator=generator)
    tables = random_tables(generator) if with_tables else (None,) * 4
    learned = random_learned(generator) if with_learned else None
    given = [history, lengths, context, prediction, counts, expected, concentrations, trust, *tables, learned]
    wanted = reference(*given, matches, top_k)
    moved = [None if each is None else each.to(backend.device) for each in given]
    got = backend.op("ngram")(*moved, matches, top_k)
    agrees([each.cpu() for each in got], wanted)

"""Random tables for a level of n-gram drafts, and what two of its kernels must agree on."""

import torch
from specstep.graphs.drafters.ngram_tables import NgramTables, pack
from specstep.kernels.ngram.learned import WAYS, learn_text

VOCABULARY, ENTRIES = 6, 3


def random_learned(generator, rows=5):
    """A table that has counted some hundred tokens of each of two rows."""
    table = torch.zeros(rows + 1, WAYS, dtype=torch.int64)
    history = torch.randint(0, VOCABULARY, (2, 240), generator=generator)
    for end in range(3, 240, 3):
        learn_text(table, history, torch.full((2,), end), torch.tensor([3, 2]), 3)
    return table


def random_tables(generator):
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))[::2]

    def entries(rows):
        tokens = torch.randint(-1, VOCABULARY, (rows, ENTRIES), generator=generator)
        return pack(tokens, torch.rand(rows, ENTRIES, generator=generator) + 1e-3)

    return NgramTables(entries(VOCABULARY), pairs, entries(len(pairs))).tensors


def agrees(got, wanted):
    (tokens, log_probs, places), (expected, scores, wanted_places) = got, wanted
    assert torch.equal(places, wanted_places)
    top_k = tokens.shape[2]
    # A logarithm may round to the neighbouring step, and two that are as good as equal then change places.
    torch.testing.assert_close(log_probs, scores, atol=1 / 4096, rtol=0)
    apart = (scores[:, :, :, None] - scores[:, :, None]).abs().add(torch.eye(top_k) * 9).nan_to_num(9).amin(-1) > 1e-3
    last = torch.arange(top_k) < top_k - 1  # whose rival may have been cut off
    sure = (apart & last) | (scores == float("-inf"))
    assert torch.equal(tokens[sure], expected[sure])

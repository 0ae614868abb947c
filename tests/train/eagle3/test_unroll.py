"""The training-time test against what the head computes in a step, position by position."""

import pytest
import torch
from models import save_eagle3, save_model
from specstep.compile.config import EngineConfig
from specstep.compile.drafters.eagle3_file import load_eagle3
from specstep.compile.source import load_source
from specstep.graphs.attention import LayerCache, chain_pass
from specstep.graphs.drafters.frontier import FrontierPasses
from specstep.train.eagle3.unroll import TrainingBatch, unroll

LEVELS, WIDTH = 3, 14


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_source(str(save_model(tmp_path_factory.mktemp("target"))), "float32", "cpu")


def drafted(head, embed, tokens, features, place):
    """Logits [LEVELS, V] that the head drafts from a position of one sequence, level by level, as a step does."""
    keys, values = ([torch.zeros(1, 2, 64, head.config.layer.head_dim)] for _ in range(2))

    def run(ids, hidden, where):
        return head(embed(ids[None]), hidden, where, LayerCache(keys, values, where.slots))

    start = torch.zeros(1, dtype=torch.int64)
    known = slice(0, place + 1)
    normed, hidden = run(
        tokens[1 : place + 2], head.fuse(features[None, known]), chain_pass(start, place + 1, place + 1)
    )
    passes, logits = FrontierPasses(start + place + 1), [head.lm_head(normed[0, -1])]
    hidden = hidden[:, -1:]
    for level in range(1, LEVELS):
        normed, hidden = run(
            tokens[place + 1 + level][None], hidden, passes.extend(torch.zeros(1, 1, dtype=torch.int64))
        )
        logits.append(head.lm_head(normed[0, 0]))
    return torch.stack(logits)


@pytest.mark.parametrize("variant", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_losses_are_those_of_the_drafts_of_a_step(variant, target, tmp_path):
    config = EngineConfig(dtype="float32")
    scorer = load_eagle3(str(save_eagle3(tmp_path, **variant)), target, config)
    head, embed = scorer.head, target.model.get_input_embeddings()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 320, (2, WIDTH), generator=generator)
    sequence = torch.tensor([[0] * 9 + [1] * 5, [2] * 3 + [3] * 11])
    labels = torch.rand(2, WIDTH, generator=generator) < 0.7
    features, last = torch.randn(2, WIDTH, 144, generator=generator), torch.randn(2, WIDTH, 48, generator=generator)
    rows = torch.randn(100, 48, generator=generator)
    got = unroll(head, embed, TrainingBatch(tokens, sequence, labels, features, last), rows, LEVELS)

    expected = torch.zeros(LEVELS, 4)
    for row in range(2):
        for first in (0, int((sequence[row] == sequence[row, 0]).sum())):
            own = sequence[row] == sequence[row, first]
            ids, said, wanted = tokens[row, own], labels[row, own], (last[row, own] @ rows.T).softmax(-1)
            for place in range(len(ids) - 1):
                padded = torch.cat([ids, torch.zeros(LEVELS, dtype=torch.int64)])
                logits = drafted(head, embed, padded, features[row, own], place)
                for level in range(LEVELS):
                    label = place + 1 + level
                    if label < len(ids) and said[label]:
                        loss = -(wanted[label] * logits[level].log_softmax(-1)).sum()
                        rank = int((logits[level] > logits[level][wanted[label].argmax()]).sum())
                        expected[level] += torch.tensor([loss, rank < 1, rank < 4, 1.0])
    torch.testing.assert_close(got.detach(), expected, rtol=1e-4, atol=1e-4)
    assert (expected[:, 3] > 0).all()

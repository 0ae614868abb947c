"""The drafts of whole sequences against what a drafter computes in a step, position by position."""

import pytest
import torch
from models import save_eagle3, save_model
from specstep.compile.drafters.eagle3_file import read_head
from specstep.compile.source import load_source
from specstep.graphs.attention import LayerCache, chain_pass
from specstep.graphs.drafters.all_depths import of_depths, with_masks
from specstep.graphs.drafters.block import block_pass
from specstep.graphs.drafters.correction import MARKOVS
from specstep.graphs.drafters.frontier import FrontierPasses
from specstep.train.drafter.initialize import mask_token
from specstep.train.drafter.kind import Wanted
from specstep.train.drafter.kinds import KINDS
from specstep.train.drafter.options import KIND_NAMES, TrainOptions
from specstep.train.drafter.unroll import TrainingBatch, unroll

LEVELS, WIDTH, VOCABULARY = 3, 14, 100


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_source(str(save_model(tmp_path_factory.mktemp("target"))), "float32", "cpu")


def caches(layers, head_dim):
    return ([torch.zeros(1, 2, 64, head_dim) for _ in range(layers)] for _ in range(2))


def drafted_eagle3(head, embed, tokens, features, place):
    """Logits [LEVELS, V] that the head drafts from a position of one sequence, level by level, as a step does."""
    keys, values = caches(1, head.config.layer.head_dim)

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


def drafted_peagle(head, embed, tokens, features, place):
    """The same, in one pass."""
    keys, values = caches(head.config.layers, head.config.layer.head_dim)
    last, masks = torch.tensor([[place]]), LEVELS - 1
    ids = with_masks(tokens[None, 1 : place + 2], last, head.config.mask, masks)
    fused = head.fuse(with_masks(features[None, : place + 1], last, head.mask_hidden, masks))
    where = chain_pass(torch.zeros(1, dtype=torch.int64), ids.shape[1], ids.shape[1])
    normed, _ = head(embed(ids), fused, where, LayerCache(keys, values, where.slots))
    return head.logits(of_depths(normed, last, masks))[0]


def drafted_block(drafter, embed, tokens, features, place):
    """The same, in one pass over a block, corrected by the text's own tokens."""
    keys, values = caches(len(drafter.layers), drafter.config.layer.head_dim)
    text = chain_pass(torch.zeros(1, dtype=torch.int64), place + 1, place + 1)
    drafter.keep(drafter.fuse(features[None, : place + 1]), text, LayerCache(keys, values, text.slots))
    wanted = torch.ones(1, dtype=torch.bool)
    masks = {causal: block_pass(torch.tensor([place + 1]), LEVELS, causal, wanted) for causal in (False, True)}
    ids = torch.full((1, LEVELS), drafter.config.mask_token)
    ids[0, 0] = tokens[place + 1]
    normed = drafter.block(embed(ids), masks, LayerCache(keys, values, masks[True].slots))
    logits = drafter.logits(normed)[0]
    if drafter.correction is None:
        return logits
    memory, corrected = torch.zeros(1, 1, drafter.correction.memory), []
    for level in range(LEVELS):
        ahead = tokens[place + 1 + level].view(1, 1)
        added, memory = drafter.correction(ahead, embed(ahead), normed[:, level : level + 1], memory)
        corrected.append(logits[level] + added[0, 0])
    return torch.stack(corrected)


DRAFTED = {"eagle3": drafted_eagle3, "p-eagle": drafted_peagle, "block": drafted_block}


def new_drafter(kind, target, **given):
    """A drafter with numbers of its own everywhere, so that layers and corrections add something."""
    options = TrainOptions(kind=kind, levels=LEVELS, **given)
    drafter = KINDS[kind].new(Wanted(target, (2, 1, 0), torch.arange(0, 3 * VOCABULARY, 3), 319, options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return drafter


def check_losses(kind, drafter, target):
    embed, generator = target.model.get_input_embeddings(), torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 320, (2, WIDTH), generator=generator)
    sequence = torch.tensor([[0] * 9 + [1] * 5, [2] * 3 + [3] * 11])
    labels = torch.rand(2, WIDTH, generator=generator) < 0.7
    features, last = torch.randn(2, WIDTH, 144, generator=generator), torch.randn(2, WIDTH, 48, generator=generator)
    rows = torch.randn(VOCABULARY, 48, generator=generator)
    batch = TrainingBatch(tokens, sequence, labels, features, last)
    got = unroll(KINDS[kind].levels, drafter, embed, batch, rows, LEVELS)

    expected = torch.zeros(LEVELS, 4)
    for row in range(2):
        for first in (0, int((sequence[row] == sequence[row, 0]).sum())):
            own = sequence[row] == sequence[row, first]
            ids, said, wanted = tokens[row, own], labels[row, own], (last[row, own] @ rows.T).softmax(-1)
            for place in range(len(ids) - 1):
                padded = torch.cat([ids, torch.zeros(LEVELS, dtype=torch.int64)])
                logits = DRAFTED[kind](drafter, embed, padded, features[row, own], place)
                for level in range(LEVELS):
                    label = place + 1 + level
                    if label < len(ids) and said[label]:
                        loss = -(wanted[label] * logits[level].log_softmax(-1)).sum()
                        rank = int((logits[level] > logits[level][wanted[label].argmax()]).sum())
                        expected[level] += torch.tensor([loss.item(), rank < 1, rank < 4, 1.0])
    torch.testing.assert_close(got.detach(), expected, rtol=1e-4, atol=1e-4)
    assert (expected[:, 3] > 0).all()


@pytest.mark.parametrize("variant", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}])
def test_losses_of_an_eagle3_head_are_those_of_the_drafts_of_a_step(variant, target, tmp_path):
    check_losses("eagle3", read_head(str(save_eagle3(tmp_path, **variant)), target)[0], target)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", ["p-eagle", "block"])
def test_losses_of_drafters_of_one_pass_are_those_of_a_step(kind, layers, target):
    check_losses(kind, new_drafter(kind, target, layers=layers), target)


@pytest.mark.parametrize("correction", [None, *MARKOVS])
def test_losses_of_a_block_are_those_of_its_correction(correction, target):
    drafter = new_drafter("block", target, markov_rank=8 if correction else 0)
    if correction:
        torch.manual_seed(4)
        drafter.correction = MARKOVS[correction](320, VOCABULARY, 8, 48)
    check_losses("block", drafter, target)


def test_every_kind_is_known():
    assert tuple(KINDS) == KIND_NAMES


def test_the_mask_came_least_and_is_as_long_as_most():
    length = torch.tensor([[1.0], [2.0], [0.0], [2.1], [2.0]])
    assert mask_token(torch.tensor([0, 3, 0, 0, 9]), length) == 3
    assert mask_token(torch.tensor([4, 3, 5, 6, 6]), length) == 1

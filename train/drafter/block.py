"""A block drafter whose slots see those ahead of them alone, with the bigrams of DSpark.

What its layers keep of position t is made of the target's feature there. The block behind it has token t + 1 in its
first slot and masks in all others; slot k, which is level k, drafts the token at t + 2 + k, and the token ahead of that
adds its bigram's logits. Since no slot sees one behind it, all blocks of a text are trained at once, slot after slot.

Sources: DSpark (arXiv 2607.05147), JetSpec's causal block.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ...compile.drafters.block_file import is_block, read_block, save_block
from ...compile.source import Source
from ...errors import InputError
from ...graphs.drafters.block import BlockConfig, BlockHead
from ...graphs.drafters.block_layer import LayerMask
from ...graphs.drafters.correction import Markov
from .initialize import adding_nothing, fit_features, layer_like
from .kind import Kind, Wanted
from .options import TrainOptions
from .unroll import TrainingBatch, TrainingPass

RANK = 64  # of a new table of bigrams


def new_block(wanted: Wanted) -> BlockHead:
    layer, options = layer_like(wanted), wanted.options
    config = BlockConfig(
        layer=layer,
        feature_layers=wanted.feature_layers,
        target_hidden_size=layer.hidden_size,
        masks=(LayerMask(causal=True),) * (options.layers or 1),
        block_size=options.levels,
        most_depth=options.levels,
        mask_token=wanted.mask,
        from_anchor=True,
    )
    count, rank = len(wanted.vocabulary), RANK if options.markov_rank is None else options.markov_rank
    tokens = wanted.target.model.get_input_embeddings().num_embeddings
    bigrams = Markov(tokens, count, rank, layer.hidden_size) if rank else None
    lm_head = nn.Linear(layer.hidden_size, count, bias=False)
    drafter: BlockHead = adding_nothing(BlockHead(config, lm_head, bigrams, d2t=True), wanted)
    return drafter


def going_on(name: str, target: Source, mask: int, options: TrainOptions) -> BlockHead:
    """A trained block drafter for the target, on its device. Raises BuildError, and InputError for one that cannot be
    trained here."""
    if not is_block(name):
        raise InputError(f"start: expected a block drafter (a folder with its config.json and weights), got {name}")
    drafter, embeddings = read_block(name, target)
    config = drafter.config
    unfit = {
        "embeddings of its own": embeddings is not None,
        "no draft vocabulary of its own": drafter.d2t is None,
        "slots that see those behind them": not all(mask.causal for mask in config.masks),
        "layers that see a part of the text": any(mask.window for mask in config.masks),
        "convolutions": config.convolution is not None,
        "a first slot that says nothing": not config.from_anchor,
        "a last slot that says nothing": config.most_depth != config.block_size,
        "scaled or capped logits": config.multiplier != 1.0 or bool(config.softcap),
        "a correction that is no table of bigrams": not isinstance(drafter.correction, Markov | None),
        f"blocks of {config.block_size} slots": config.most_depth < options.levels,
    }
    if any(unfit.values()):
        got = " and ".join(words for words, wrong in unfit.items() if wrong)
        raise InputError(
            f"start: {name}: expected a block drafter as train-drafter writes it, of at least {options.levels} levels, "
            f"got one with {got}"
        )
    return drafter.to(target.model.device, torch.float32)  # lm_head is as in the file


def levels(drafter: BlockHead, embed: nn.Module, batch: TrainingBatch, count: int) -> list[Tensor]:
    where: Any = TrainingPass(batch.sequence)
    context, logits = drafter.fuse(batch.features), []
    drafter.keep(context, where, where)
    memory = context.new_zeros(*context.shape[:2], drafter.correction.memory if drafter.correction else 0)
    for level in range(count):
        ahead = batch.ahead(level + 1)
        embedded = embed(ahead).to(context.dtype)
        masked = embed(ahead.new_full(ahead.shape, drafter.config.mask_token)).to(context.dtype)
        normed = drafter.block(masked if level else embedded, {False: where, True: where}, where)
        drafted = drafter.logits(normed)
        if drafter.correction is not None:
            added, memory = drafter.correction(ahead, embedded, normed, memory)
            drafted = drafted + added
        logits.append(drafted)
    return logits


BLOCK = Kind(new_block, going_on, fit_features, levels, save_block)

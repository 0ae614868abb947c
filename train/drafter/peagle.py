"""A head that says all levels in one pass, P-EAGLE: from level 1 on it holds a mask in place of what it does not know.

At level 0 position t holds the target's feature at t and token t + 1, as in EAGLE-3; at level k it holds `mask_hidden`
in the features' place and the mask token. P-EAGLE trains on some positions of the deeper levels, here on all.

Source: P-EAGLE (arXiv 2602.01469).
"""

import dataclasses
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...compile.drafters.eagle3_file import is_eagle3, read_head, read_head_as
from ...compile.drafters.peagle_file import is_peagle, read_peagle, save_peagle
from ...compile.source import Source
from ...errors import InputError
from ...graphs.drafters.peagle import PEagleConfig, PEagleHead
from .eagle3 import check_start
from .initialize import ADDED, adding_nothing, fit_features, layer_like
from .kind import Kind, Wanted
from .options import TrainOptions
from .unroll import TrainingBatch, TrainingPass


def new_head(wanted: Wanted) -> PEagleHead:
    count = wanted.options.layers or 1
    config = PEagleConfig(
        layer_like(wanted),
        len(wanted.vocabulary),
        wanted.target.model.config.get_text_config().hidden_size,
        wanted.feature_layers,
        windows=(0,) * count,
        layers=count,
        mask=wanted.mask,
    )
    head: PEagleHead = adding_nothing(PEagleHead(config), wanted)
    return head


def going_on(name: str, target: Source, mask: int, options: TrainOptions) -> PEagleHead:
    """A trained head for the target, on its device: P-EAGLE's, or an EAGLE-3 head with what it lacks. Raises
    BuildError, and InputError for what is neither."""
    if not is_eagle3(name):
        raise InputError(f"start: expected a P-EAGLE or EAGLE-3 head (config.json and weights), got {name}")
    if is_peagle(name):
        head, embeddings = read_head_as(PEagleHead, read_peagle, name, target)
        if options.layers not in (None, head.config.layers):
            raise InputError(f"layers: expected {head.config.layers}, as {name} has, or none, got {options.layers}")
        check_start(name, head, embeddings, options)
        return head.to(target.model.device)
    first, embeddings = read_head(name, target)
    check_start(name, first, embeddings, options)
    fields = {field.name: getattr(first.config, field.name) for field in dataclasses.fields(first.config)}
    layers = options.layers or 1
    windows = first.config.windows + (0,) * (layers - 1)
    head = PEagleHead(PEagleConfig(**fields | {"windows": windows}, layers=layers, mask=mask))
    with torch.no_grad():
        for parameter in (p for key, p in head.layers.named_parameters() if key.endswith(ADDED)):
            parameter.zero_()
    head.load_state_dict(first.state_dict(), strict=False)
    return head.to(target.model.device)


@torch.no_grad()
def begin(head: PEagleHead, batches: Iterable[TrainingBatch], fresh: bool) -> None:
    """As `fit_features`; a mask that is nothing yet begins as the mean of the features."""
    batches = iter(batches)
    if not head.mask_hidden.any():
        first = next(batches)
        head.mask_hidden.copy_(first.features.float().mean((0, 1), keepdim=True))
        batches = itertools.chain([first], batches)
        del first  # batches that were read are held by nothing
    fit_features(head, batches, fresh)


def levels(head: PEagleHead, embed: nn.Module, batch: TrainingBatch, count: int) -> list[Tensor]:
    where, hidden = TrainingPass(batch.sequence), head.fuse(batch.features)
    embedded = embed(batch.ahead(1)).to(hidden.dtype)
    masked = embed(torch.full_like(batch.tokens, head.config.mask)).to(hidden.dtype)
    unknown = head.fuse(head.mask_hidden.to(batch.features.dtype)).expand_as(hidden)
    logits = []
    for level in range(count):
        given = (masked, unknown) if level else (embedded, hidden)
        normed, _ = head(*given, where, where)
        logits.append(head.logits(normed))
    return logits


P_EAGLE = Kind(new_head, going_on, begin, levels, save_peagle)

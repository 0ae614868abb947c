"""PARD-2 models as they are published: a PARD model, and beside it `warp_model.bin` with what takes the target's hidden
states to its embeddings. Source: AMD-AGI/PARD, pard2_infer.py."""

from typing import Any

import torch
from torch import nn

from ...errors import BuildError
from ...graphs.drafters.pard2 import Pard2
from ...graphs.drafters.vocabulary import CommonTokens, SameTokens
from ...graphs.kept import CacheLayer
from ...graphs.target import CausalLM
from ..config import EngineConfig
from ..locate import local
from ..source import Source
from .published import fill, read_tensors

FILE = "warp_model.bin"
SCALES = ("pard2_scale", "pard_scale", "feat_scale")  # the factor's names in a config, the newest first
SCALE = 0.02  # where the config says none, as in the publisher's code


def is_pard2(source: Source) -> bool:
    """Whether a draft model reads its target's hidden states, as its config.json says."""
    config = source.model.config.get_text_config()
    return bool(getattr(config, "pard2", False)) or getattr(config, "spd_type", None) == "pard2"


def load_pard2(
    source: Source,
    target: Source,
    config: EngineConfig,
    layers: list[CacheLayer],
    tokens: SameTokens | CommonTokens,
    mask: int,
) -> Pard2:
    """The scorer of a loaded PARD-2 model. layers: its cache; tokens: what the target's are to it; mask: its mask
    token. Raises BuildError naming every field or tensor that does not fit."""
    own, text = source.model.config.get_text_config(), target.model.config.get_text_config()
    features = target_layers(source.name, getattr(own, "pard2_target_layers", None), text.num_hidden_layers)
    scale = next((getattr(own, name) for name in SCALES if getattr(own, name, None) is not None), SCALE)
    if type(scale) not in (int, float):
        raise BuildError(f"drafter: {source.name}: {SCALES[0]}: expected a number, got {scale!r}")
    projection: Any = _projection(source, len(features) * text.hidden_size)
    projection = projection.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    scorer = Pard2(CausalLM(source.model), layers, tokens, mask, projection, float(scale), features)
    return scorer.eval().requires_grad_(False)


def _projection(source: Source, width: int) -> nn.Module:
    """What takes so many numbers of the target to the model's embeddings. Raises BuildError."""
    own = source.model.config.get_text_config()
    said = getattr(own, "pard2_target_dim", width)
    if said != width:
        raise BuildError(
            f"drafter: {source.name}: pard2_target_dim: expected {width}, that of what it reads, got {said!r}"
        )
    file = local(source.name) / FILE
    if not file.is_file():
        raise BuildError(f"drafter: {source.name}: expected {FILE}, by which it reads hidden states, got none")
    made = nn.ModuleDict(
        {"target_proj": nn.Linear(width, own.hidden_size, bias=bool(getattr(own, "pard2_proj_bias", False)))}
    )
    fill(source.name, made, read_tensors(str(file)))
    return made["target_proj"]


def target_layers(name: str, given: Any, layers: int) -> tuple[int, ...]:
    """Indices into transformers' `hidden_states`, from the end where they are negative -> ours, of a target with so
    many layers: the last of transformers' is the one behind the final norm. Raises BuildError."""
    good = isinstance(given, list | tuple) and given and all(type(i) is int for i in given)
    if not good or not all(-layers - 1 <= i <= layers for i in given):
        raise BuildError(
            f"drafter: {name}: pard2_target_layers: expected hidden states {-layers - 1} to {layers} of the target, "
            f"got {given!r}"
        )
    found = (i % (layers + 1) for i in given)
    return tuple(i + 1 if i == layers else i for i in found)

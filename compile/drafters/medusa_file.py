"""Medusa's heads as they are published: `medusa_lm_head.pt` or .safetensors, or under vLLM's names. config.json may say
another number of heads and layers than the file has: the file decides."""

import re

import torch
from torch import Tensor

from ...errors import BuildError
from ...graphs.drafters.medusa import MedusaHeads
from ...graphs.drafters.position_heads import PositionHeads
from ..config import EngineConfig
from ..source import Source
from .published import FILES, fill, folder_of, read_tensors, renamed, tensor_names

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *FILES)
FIRST = {"blocks.0.layers.0.weight", "lm_heads.0.weight"}  # names for the first position
NAMES = (  # what is published, and the name that `MedusaHeads` has for it
    (r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.layers.\2.\3"),
    (r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
    (r"(?:medusa_heads?\.)?(blocks\.\d+\.layers\.\d+\.(?:weight|bias)|lm_heads\.\d+\.weight|token_map)", r"\1"),
)


def is_medusa(name: str) -> bool:
    """Whether a path holds such heads: a file of that name, or a residual block and a head for the first position."""
    named = any((folder_of(name) / file).is_file() for file in MEDUSA_FILES[:2])
    return named or {renamed(NAMES, key) for key in tensor_names(name, MEDUSA_FILES)} >= FIRST


def load_medusa(name: str, target: Source, config: EngineConfig) -> PositionHeads:
    """The heads of a directory or a file -> their scorer, in the engine's dtype and on its device. Raises BuildError
    naming every tensor that does not fit."""
    tensors = {renamed(NAMES, key): value for key, value in read_tensors(name, MEDUSA_FILES).items()}
    token_map = tensors.pop("token_map", None)
    text, targets = target.model.config.get_text_config(), target.model.get_output_embeddings().weight
    if missing := sorted(FIRST - set(tensors)):
        raise BuildError(f"drafter: {name}: tensors do not fit: missing {', '.join(missing)}")
    blocks = {(int(m[1]), int(m[2])) for key in tensors if (m := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", key))}
    count, layers = (1 + max(pair[place] for pair in blocks) for place in range(2))
    if token_map is not None:
        _cut_to(name, tensors, token_map, len(targets))
    rows = len(tensors["lm_heads.0.weight"])
    if rows > len(targets):
        raise BuildError(f"drafter: {name}: lm_heads.0.weight: expected at most {len(targets)} rows, got {rows}")
    if set(tensors) & {f"lm_heads.{head}.weight" for head in range(1, count)} == set():  # one for all
        tensors |= {f"lm_heads.{head}.weight": tensors["lm_heads.0.weight"] for head in range(1, count)}
    heads = MedusaHeads(count, layers, text.hidden_size, rows, any(key.endswith(".bias") for key in tensors))
    fill(name, heads, tensors)
    heads = heads.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    scorer = PositionHeads(heads, text.num_hidden_layers + 1, None if token_map is None else token_map.long())
    return scorer.to(config.build_device).eval().requires_grad_(False)


def _cut_to(name: str, tensors: dict[str, Tensor], token_map: Tensor, vocabulary: int) -> None:
    """Heads over all tokens to those of the map [rows]: the target's ids of what is drafted. Raises BuildError."""
    good = token_map.dim() == 1 and not token_map.is_floating_point() and len(token_map) > 0
    if not good or int(token_map.min()) < 0 or int(token_map.max()) >= vocabulary:
        raise BuildError(f"drafter: {name}: token_map: expected ids below {vocabulary}, got {token_map}")
    for key in [key for key in tensors if key.startswith("lm_heads.")]:
        if len(tensors[key]) > len(token_map):
            tensors[key] = tensors[key][token_map.long()]

"""P-EAGLE heads as they are published: as EAGLE-3 heads, with more layers, `mask_hidden`, and a mask token."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...graphs.drafters.peagle import PEagle, PEagleConfig, PEagleHead
from ..config import EngineConfig
from ..source import Source
from .eagle3_config import config_from, windows
from .eagle3_file import is_eagle3, placed, read_head_as, write_head
from .published import config_of

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # the mask token's id, as each publisher calls it


def is_peagle(name: str) -> bool:
    """Whether a path is a P-EAGLE head: its config.json says so, or has a mask token beside a draft vocabulary."""
    if not is_eagle3(name):
        return False
    data = config_of(name) or {}
    return data.get("speculators_model_type") == "peagle" or any(data.get(field) is not None for field in MASKS)


def load_peagle(name: str, target: Source, config: EngineConfig) -> PEagle:
    """As `load_eagle3`. Raises BuildError."""
    head, own = read_head_as(PEagleHead, read_peagle, name, target)
    scorer = PEagle(*placed(head, own, target, config))
    if head.config.mask >= scorer.embed.num_embeddings:
        most = scorer.embed.num_embeddings - 1
        raise BuildError(f"drafter: {name}: mask token: expected an id from 0 to {most}, got {head.config.mask}")
    return scorer.eval().requires_grad_(False)


def read_peagle(path: Path, target_hidden: int, target_layers: int, vocabulary: int) -> PEagleConfig:
    """As `read_config`: the fields of an EAGLE-3 head, and its own. Raises BuildError."""
    data: dict[str, Any] = json.loads(path.read_text())
    kind = data.get("speculators_model_type", "peagle")
    if kind != "peagle":
        raise BuildError(f"drafter: {path}: speculators_model_type: expected peagle beside a mask token, got {kind}")
    mask = next((data[field] for field in MASKS if data.get(field) is not None), None)
    if type(mask) is not int or mask < 0:
        raise BuildError(f"drafter: {path}: {' or '.join(MASKS)}: expected the mask token's id, got {mask!r}")
    nested = data.get("transformer_layer_config")
    inner = nested or data
    layers = inner.get("num_hidden_layers", 1)
    if type(layers) is not int or layers < 1:
        raise BuildError(f"drafter: {path}: num_hidden_layers: expected at least 1, got {layers!r}")
    first = data | {"num_hidden_layers": 1}
    if "speculators_model_type" in data:
        first["speculators_model_type"] = "eagle3"
    if nested:
        first["transformer_layer_config"] = nested | {"num_hidden_layers": 1}
    head = config_from(path, first, target_hidden, target_layers, vocabulary)
    fields = {field.name: getattr(head, field.name) for field in dataclasses.fields(head)}
    return PEagleConfig(**fields | {"windows": windows(path, inner, layers)}, layers=layers, mask=mask)


def save_peagle(folder: Path, head: PEagleHead, target: Source) -> None:
    """Write a head as the field publishes them. Raises BuildError when it cannot be written."""
    masks = dict.fromkeys(MASKS, head.config.mask)  # each publisher looks for another
    write_head(folder, head, target, {"num_hidden_layers": head.config.layers} | masks)

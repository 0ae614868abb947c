"""Speculators of the type `mlp_speculator` as they are published: config.json, and tensors behind `speculator.`."""

from typing import Any

import torch
from torch import Tensor

from ...errors import BuildError
from ...graphs.drafters.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from ...graphs.drafters.position_heads import PositionHeads
from ..config import EngineConfig
from ..source import Source
from .published import config_of, fill, read_tensors


def is_mlp_speculator(name: str) -> bool:
    """Whether a path is such a speculator, as its config.json says."""
    return (config_of(name) or {}).get("model_type") == "mlp_speculator"


def load_mlp_speculator(name: str, target: Source, config: EngineConfig) -> PositionHeads:
    """A speculator from a directory, or from a weights file with config.json beside it -> its scorer, in the engine's
    dtype and on its device. Raises BuildError naming every field or tensor that does not fit."""
    shape = read_mlp_config(name, target)
    heads = MlpSpeculator(shape)
    tensors = {key.removeprefix("speculator."): value for key, value in read_tensors(name).items()}
    fill(name, heads, _once(tensors, heads) if shape.tied else tensors)
    heads = heads.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    last = target.model.config.get_text_config().num_hidden_layers + 1
    return PositionHeads(heads, last).eval().requires_grad_(False)


def read_mlp_config(name: str, target: Source) -> MlpSpeculatorConfig:
    """The config of a speculator for the target. Raises BuildError."""
    data: dict[str, Any] = config_of(name) or {}
    for field in ("n_predict", "emb_dim", "vocab_size"):
        if type(data.get(field)) is not int or data[field] < 1:
            raise BuildError(f"drafter: {name}: {field}: expected a number from 1 on, got {data.get(field)!r}")
    size, rows = target.model.config.get_text_config().hidden_size, target.model.get_output_embeddings().weight.shape[0]
    if data["emb_dim"] != size:
        raise BuildError(f"drafter: {name}: emb_dim: expected {size}, the target's hidden size, got {data['emb_dim']}")
    if data["vocab_size"] > rows:
        raise BuildError(f"drafter: {name}: vocab_size: expected at most {rows}, got {data['vocab_size']}")
    return MlpSpeculatorConfig(
        levels=data["n_predict"],
        hidden_size=size,
        inner_size=data.get("inner_dim") or size,
        vocabulary=data["vocab_size"],
        tied=bool(data.get("tie_weights", False)),
        scale_input=bool(data.get("scale_input", False)),
    )


def _once(tensors: dict[str, Tensor], heads: MlpSpeculator) -> dict[str, Tensor]:
    """The tensors of tied levels without those that a file has once more for further levels."""
    own = heads.state_dict()

    def first(name: str) -> str:
        kind, _, rest = name.partition(".")
        level, _, field = rest.partition(".")
        return f"{kind}.{min(int(level), 1 if kind == 'proj' else 0)}.{field}" if level.isdigit() else name

    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in own or first(name) not in tensors or not torch.equal(tensor, tensors[first(name)])
    }

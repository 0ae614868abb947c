"""PEFT's adapters, merged into a model's weights: LoRA, with its embeddings, biases and whole modules."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import BuildError
from .json_object import read_object
from .locate import ADAPTER, ADAPTER_WEIGHTS

PAIRS = {"lora_A.weight": "lora_B.weight", "lora_embedding_A": "lora_embedding_B"}  # [r, K] and [N, r]
# Fields of the config that would change what is computed, and their values that do not.
UNREAD: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "lora_bias": (False,),
    "alora_invocation_tokens": (None,),  # it acts behind these tokens alone
    # Others change the base's weights when they are loaded: pissa, olora, loftq, corda.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica", "lora_ga"),
}
PREFIX = "base_model.model."


def base_of(folder: Path) -> str:
    """The model that an adapter was trained on. Raises BuildError."""
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BuildError(f"adapter: {folder}: base_model_name_or_path: expected a model, got {base!r}; give the model")
    return base


def merge_adapter(model: nn.Module, folder: Path) -> None:
    """Add an adapter to a model's weights, in float32. Raises BuildError for what of it is not understood, or not for
    this model."""
    config, tensors = _config(folder), _tensors(folder)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    factors = {name: tensors.pop(name) for name in list(tensors) if name.endswith((*PAIRS, *PAIRS.values()))}
    for name, tensor in tensors.items():  # whole modules, and biases; an embedding may be there as it was
        if name not in parameters:
            raise BuildError(f"adapter: {folder}: expected tensors of LoRA, got {name}")
        shared = [other for other, weight in parameters.items() if weight is parameters[name]]
        if len(shared) > 1 and not torch.equal(tensor.to(parameters[name]), parameters[name]):
            raise BuildError(
                f"adapter: {folder}: {name}: expected a weight of its own, got one that {' and '.join(shared)} share"
            )
        _set(parameters[name], tensor, folder, name)
    for name in [name for name in factors if name.endswith(tuple(PAIRS))]:
        first = next(part for part in PAIRS if name.endswith(part))
        layer = name.removesuffix(f".{first}")
        down, up = factors[name], factors.get(f"{layer}.{PAIRS[first]}")
        weight = parameters.get(f"{layer}.weight")
        if up is None or weight is None or up.shape[1] != down.shape[0]:
            raise BuildError(f"adapter: {folder}: {layer}: expected a layer of the model and both of its factors")
        if [id(other) for other in parameters.values()].count(id(weight)) > 1:
            raise BuildError(f"adapter: {folder}: {layer}: expected a weight of its own, got one that layers share")
        change = up.float() @ down.float() * _scale(config, layer, len(down))
        change = change.T if config.get("fan_in_fan_out") or "embedding" in first else change
        _set(weight, change, folder, layer, weight.detach().float())


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / ADAPTER).is_file():
        raise BuildError(f"adapter: expected a directory with {ADAPTER}, got {folder}")
    config = read_object(folder / ADAPTER, "adapter")
    if config.get("peft_type") != "LORA":
        raise BuildError(f"adapter: {folder}: peft_type: expected LORA, got {config.get('peft_type')}")
    for field, known in UNREAD.items():
        if (got := config.get(field, known[0])) not in known:
            expected = " or ".join(map(str, known))
            raise BuildError(f"adapter: {folder}: {field}: expected {expected}, got {got}; merge it with peft")
    return config


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The adapter's tensors by the names of the model."""
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise BuildError(f"adapter: {folder}: expected {ADAPTER_WEIGHTS}, got {error}") from None
    return {name.removeprefix(PREFIX).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """What the product of the factors is multiplied by."""
    own = (value for key, value in (config.get("alpha_pattern") or {}).items() if _names(key, layer))
    alpha = next(own, config.get("lora_alpha", 8))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _names(key: str, layer: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", layer) is not None


@torch.no_grad()
def _set(weight: nn.Parameter, value: Tensor, folder: Path, name: str, before: Tensor | float = 0.0) -> None:
    """Make a weight `before` + `value`. Raises BuildError for one of another shape."""
    if value.shape != weight.shape:
        raise BuildError(f"adapter: {folder}: {name}: expected shape {tuple(weight.shape)}, got {tuple(value.shape)}")
    weight.copy_(before + value)

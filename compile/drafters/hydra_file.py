"""Hydra's heads as they are published: config.json and `hydra_lm_head.pt`. `hydra_head_arch` mlp is Hydra, prefix-mlp
Hydra++; the two others, which attend at each level, are refused."""

import re

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import BuildError
from ...graphs.drafters.drafter import Scorer
from ...graphs.drafters.hydra import HydraHeads, HydraPlus, PrefixLayer
from ...graphs.drafters.position_heads import PositionHeads
from ..config import EngineConfig
from ..source import Source
from .eagle3_config import layer_config
from .published import FILES, config_of, fill, folder_of, read_tensors

HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt", *FILES)
PREFIX = "prefix_embeding_layer."  # as it is spelt
ARCHITECTURES = ("mlp", "prefix-mlp")
UNUSED = rf"{re.escape(PREFIX)}embed_tokens\.weight|.*inv_freq"  # the layer takes hidden states; its angles follow


def is_hydra(name: str) -> bool:
    """Whether a path holds such heads, as its config.json says, or the name of its file."""
    named = any((folder_of(name) / file).is_file() for file in HYDRA_FILES[:2])
    return named or "hydra_head_arch" in (config_of(name) or {})


def load_hydra(name: str, target: Source, config: EngineConfig) -> Scorer:
    """The heads of a directory, or of a file with config.json beside it -> their scorer, in the engine's dtype and on
    its device. Raises BuildError naming every field or tensor that does not fit."""
    data, text = config_of(name) or {}, target.model.config.get_text_config()
    for field, known in (("hydra_head_arch", ARCHITECTURES), ("grounded_heads", (True,))):
        if data.get(field) not in known:
            expected = " or ".join(map(str, known))
            raise BuildError(f"drafter: {name}: {field}: expected {expected}, got {data.get(field)}")
    offset = data.get("hidden_state_offset", 0)
    if type(offset) is not int or not 0 <= offset <= text.num_hidden_layers:
        raise BuildError(
            f"drafter: {name}: hidden_state_offset: expected 0 to {text.num_hidden_layers}, got {offset!r}"
        )
    layer = text.num_hidden_layers - offset if offset else text.num_hidden_layers + 1
    tensors = {key: value for key, value in read_tensors(name, HYDRA_FILES).items() if not re.fullmatch(UNUSED, key)}
    heads = _heads(name, target, {_own_name(k): v for k, v in tensors.items() if not k.startswith(PREFIX)})
    scorer: Scorer = PositionHeads(heads, layer)
    if data["hydra_head_arch"] == "prefix-mlp":
        fields = text.to_dict() | {"num_hidden_layers": 1}
        prefix = PrefixLayer(layer_config(name, fields, text.hidden_size), layer)
        fill(name, prefix, {_own_name(k): v for k, v in tensors.items() if k.startswith(PREFIX)})
        scorer = HydraPlus(prefix, heads)
    elif odd := [key for key in tensors if key.startswith(PREFIX)]:
        raise BuildError(f"drafter: {name}: tensors do not fit: unexpected {odd[0]}")
    scorer = scorer.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    if isinstance(scorer, HydraPlus):  # its frequencies stay float32
        scorer.head.rotary = LlamaRotaryEmbedding(scorer.head.config).to(config.build_device)
    return scorer.eval().requires_grad_(False)


def _heads(name: str, target: Source, tensors: dict[str, Tensor]) -> HydraHeads:
    """The heads that a file has: their number and that of their layers it says. Raises BuildError."""
    found = {key: match for key in tensors if (match := re.match(r"hydra_mlp\.(\d+)\.(\d+)\.", key))}
    if not found or "hydra_lm_head.0.weight" not in tensors:
        raise BuildError(f"drafter: {name}: tensors do not fit: missing hydra_mlp.0 or hydra_lm_head.0")
    places = sorted({int(match[2]) for match in found.values()})  # dropouts have taken the others
    count, layers = 1 + max(int(match[1]) for match in found.values()), len(places)
    renamed = {
        key: f"hydra_mlp.{match[1]}.{places.index(int(match[2]))}.{key[match.end() :]}" for key, match in found.items()
    }
    tensors = {renamed.get(key, key): value for key, value in tensors.items()}
    embed, rows = target.model.get_input_embeddings(), len(tensors["hydra_lm_head.0.weight"])
    most = len(target.model.get_output_embeddings().weight)
    if rows > most:
        raise BuildError(f"drafter: {name}: hydra_lm_head.0.weight: expected at most {most} rows, got {rows}")
    heads = HydraHeads(count, layers, target.model.config.get_text_config().hidden_size, rows, embed)
    fill(name, heads, tensors, without=["embed."])
    return heads


def _own_name(name: str) -> str:
    """The name that our modules have. Hydra++ has a dropout ahead of each head, which takes a number, too."""
    if match := re.fullmatch(r"hydra_lm_head\.(\d+)\.1\.(\w+)", name):
        return f"hydra_lm_head.{match[1]}.{match[2]}"
    for theirs, own in ((f"{PREFIX}layers.0.input_layernorm.", "input_layernorm."), (f"{PREFIX}layers.0.", "layer.")):
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name.removeprefix(PREFIX)

"""Heads of EAGLE, EAGLE-2 and HASS as they are published: by their authors, whose config.json is that of a Llama of one
layer, or as the type `eagle` of speculators. Which one it is, and that it is one at all, the names of its tensors say.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import BuildError
from ...graphs.drafters.eagle import EagleConfig, EagleHead
from ...graphs.drafters.recurrent import Recurrent
from ..config import EngineConfig
from ..source import Source
from .eagle3_config import layer_config
from .published import config_of, fill, linear, read_tensors, renamed, tensor_names

NAMES = (  # what is published, and the name that `EagleHead` has for it
    (r"(?:model\.)?(?:fc|fusion_fc)\.(weight|bias)", r"fc.\1"),
    (r"(?:model\.)?(?:layers\.0|transformer)\.(.*)", r"layer.\1"),
    (r"(?:model\.)?(embed_tokens|lm_head)\.weight", r"\1.weight"),
)
FREQUENCIES = "inv_freq"  # of rotary embeddings, which follow from the config


def is_eagle(name: str) -> bool:
    """Whether a path is such a head: beside its config.json lie tensors that fuse an embedding with a hidden state."""
    names = {renamed(NAMES, key) for key in tensor_names(name)} if config_of(name) is not None else set()
    return {"fc.weight", "layer.self_attn.q_proj.weight"} <= names


def load_eagle(name: str, target: Source, config: EngineConfig) -> Recurrent:
    """A head from a directory, or from a weights file with config.json beside it -> its scorer, in the engine's dtype
    and on its device. Raises BuildError naming every field or tensor that does not fit."""
    tensors = {renamed(NAMES, key): value for key, value in read_tensors(name).items() if not key.endswith(FREQUENCIES)}
    head_of_own, embed_of_own = tensors.pop("lm_head.weight", None), tensors.pop("embed_tokens.weight", None)
    model: Any = target.model
    embed = model.get_input_embeddings() if embed_of_own is None else nn.Embedding.from_pretrained(embed_of_own)
    head = EagleHead(
        read_eagle_config(name, target), model.get_output_embeddings() if head_of_own is None else linear(head_of_own)
    )
    _check_sizes(name, head, embed_of_own, head_of_own, model.get_output_embeddings().weight)
    fill(name, head, tensors, without=["lm_head."])
    head = head.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    head.rotary = LlamaRotaryEmbedding(head.config.layer).to(config.build_device)  # its frequencies stay float32
    return Recurrent(head, embed.to(head.fc.weight)).eval().requires_grad_(False)


def read_eagle_config(name: str, target: Source) -> EagleConfig:
    """The config of a head for the target. Raises BuildError."""
    data = config_of(name) or {}
    inner = data.get("transformer_layer_config") or data
    expected = {
        "transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False, "speculators_model_type": "eagle"
    }  # fmt: skip
    for field, wanted in expected.items():
        if data.get(field, wanted) != wanted:
            raise BuildError(f"drafter: {name}: {field}: expected {wanted}, got {data[field]}, which is not supported")
    text = target.model.config.get_text_config()
    layer = layer_config(name, inner, text.hidden_size)
    # The authors' code takes an absent `bias` for true, speculators an absent `fusion_bias` for false.
    bias = data.get("fusion_bias", False) if "speculators_model_type" in data else data.get("bias", True)
    input_bias = bool(inner.get("qkv_bias", layer.attention_bias))
    return EagleConfig(layer, text.num_hidden_layers + 1, bool(bias), input_bias)


def _check_sizes(name: str, head: EagleHead, embed: Tensor | None, lm_head: Tensor | None, targets: Tensor) -> None:
    """Refuse embeddings and a head of its own that do not fit. Raises BuildError."""
    size = head.config.layer.hidden_size
    if embed is not None and embed.shape[1:] != (size,):
        raise BuildError(f"drafter: {name}: embed_tokens.weight: expected {size} columns, got {list(embed.shape)}")
    if lm_head is not None and lm_head.shape != targets.shape:
        raise BuildError(
            f"drafter: {name}: lm_head.weight: expected {list(targets.shape)}, as the target's, got "
            f"{list(lm_head.shape)}"
        )

"""Llama 4, whose layers attend within chunks of the text, and whose experts are given inputs that their scores scaled.

Letters: N tokens, P pairs of a token and one of its experts.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.expert_linear.op import expert_linear
from .attention import ATTENTION_NAME

CHUNKED = "chunked_attention"  # a type of layer
MIXTURE = "Llama4TextMoe"


def keep_to_first_chunk(model: PreTrainedModel) -> int | None:
    """Have a model's layers compute what they do for a text of one chunk -> the longest such text, None where no layer
    attends within chunks. Up to it they attend to all that is before a token, and transformers scales no query: it
    would count the tokens of a pass for that, of which several share a position in a tree."""
    config = model.config.get_text_config()
    bounds = [config.attention_chunk_size] if CHUNKED in (getattr(config, "layer_types", None) or ()) else []
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False
            bounds.append(module.floor_scale - 1)
    return min(bounds, default=None)


def has_mixture(model: PreTrainedModel) -> bool:
    """Whether the model's code has experts whose inputs are scaled."""
    return hasattr(sys.modules[type(model).__module__], MIXTURE)


def register_mixture(model: PreTrainedModel) -> None:
    """Have such experts compute the tokens that take them alone, where attention is ours: transformers' code gives all
    tokens to each, times zero where they do not take it."""
    for module in model.modules():
        if type(module).__name__ == MIXTURE and type(module).forward.__module__ != __name__:
            type(module).forward = _either(type(module).forward)


def _either(original: Any) -> Any:
    def forward(mixture: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if mixture.shared_expert.config._attn_implementation != ATTENTION_NAME:
            return original(mixture, hidden_states)
        x = hidden_states.reshape(-1, mixture.hidden_dim)
        _, logits = mixture.router(x)
        return mixture.shared_expert(x) + _routed(mixture, x, logits), logits

    return forward


def _routed(mixture: Any, x: Tensor, logits: Tensor) -> Tensor:
    """What the experts of each token add: x [N, hidden], logits [N, experts] -> [N, hidden]."""
    chosen, experts = torch.topk(logits, mixture.top_k, dim=1)
    scores = torch.sigmoid(chosen.float()).to(x.dtype).reshape(-1, 1)
    pairs = x.repeat_interleave(mixture.top_k, 0) * scores  # [P, hidden]
    weights, of_pairs = mixture.experts, experts.reshape(-1)
    gate, up = expert_linear(pairs, weights.gate_up_proj, of_pairs, True).chunk(2, dim=-1)
    out = expert_linear(up * weights.act_fn(gate), weights.down_proj, of_pairs, True)
    return out.view(*experts.shape, -1).sum(1)

"""The experts function that transformers' mixture models call while they are traced.

Letters: N tokens, E experts, P pairs of a token and one of its experts.
"""

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..kernels.expert_linear.op import expert_linear

EXPERTS_NAME = "specstep"


def mix_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface. hidden_states [N, hidden], top_k_index [N, top_k] int64 and top_k_weights of
    that shape -> [N, hidden]."""
    tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    x = hidden_states.repeat_interleave(top_k, 0)
    x = _linear(module, "gate_up_proj" if module.has_gate else "up_proj", x, experts)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _linear(module, "down_proj", x, experts)
    if getattr(module, "has_post_expert_norm", False):  # older transformers have none
        x = module.post_expert_norm(x)
    mixed = (x * top_k_weights.reshape(-1, 1)).view(tokens, top_k, -1).sum(1)
    return mixed.to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, experts: Tensor) -> Tensor:
    """x [P, K] through the linear layer `name` of each pair's expert."""
    out: Tensor = expert_linear(x, getattr(module, name), experts, module.is_transposed)
    return out + getattr(module, f"{name}_bias")[experts] if module.has_bias else out


def register_experts() -> None:
    """Make `experts_implementation="specstep"` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, mix_experts)

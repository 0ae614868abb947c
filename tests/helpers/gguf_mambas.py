"""Tiny models of Mamba's layers alone, and of Jamba, as llama.cpp's converter writes them."""

from typing import Any

from gguf_case import Case
from gguf_hybrids import mamba, time_step
from torch import Tensor

KEYS = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 5,
    "attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0,
    "attention.layer_norm_epsilon": None, "attention.layer_norm_rms_epsilon": 1e-3,
}  # fmt: skip
MAMBA_1 = {
    "intermediate_size": 96, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 5,
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
MAMBA_2 = {
    "num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 16, "conv_kernel": 4, "expand": 2, "chunk_size": 8,
    "layer_norm_epsilon": 1e-3,
}  # fmt: skip
JAMBA = {
    "num_hidden_layers": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2,
    "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_dt_rank": 5, "rms_norm_eps": 1e-3,
}  # fmt: skip
JAMBA_KEYS = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 5,
    "attention.head_count_kv": [0, 2, 0, 0, 2], "expert_count": 4, "expert_used_count": 2,
}  # fmt: skip


def channels(model: Any, name: str, tensor: Tensor) -> Tensor:
    """Mamba's, with a number for each channel and each place of its state."""
    return -tensor.exp() if name.endswith("ssm_a") else tensor.squeeze(1) if "ssm_conv1d.weight" in name else tensor


def heads(model: Any, name: str, tensor: Tensor) -> Tensor:
    return mamba(model.config.n_groups, tensor, name)


MAMBAS = {
    "mamba": Case("mamba", "Mamba", MAMBA_1 | {"tie_word_embeddings": True}, KEYS, channels),
    "falcon-mamba": Case("mamba", "FalconMamba", MAMBA_1, KEYS | {"ssm.dt_b_c_rms": True}, channels),
    "mamba2": Case(
        "mamba2", "Mamba2", MAMBA_2, KEYS | {"ssm.time_step_rank": 12, "ssm.group_count": 2}, heads, time_step
    ),
    "jamba": Case("jamba", "Jamba", JAMBA, JAMBA_KEYS, channels),
    "jamba of one block": Case(
        "jamba", "Jamba", JAMBA | {"num_experts": 1, "num_experts_per_tok": 1},
        JAMBA_KEYS | {"expert_count": 1, "expert_used_count": 1}, channels,
    ),
}  # fmt: skip

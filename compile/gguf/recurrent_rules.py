"""Weights of recurrent layers, which the converter names, orders or scales in its own way."""

from typing import Any

import torch
from torch import Tensor

from .rules import CONVOLUTION, SCORES, Rule

_LAYER = r"(?:model|backbone)\.layers\.(\d+)\.(?:linear_attn|mamba|mixer)\."


def _logarithm(config: Any, decay: Tensor) -> Tensor:
    """What the file has -exp of. Raises ValueError."""
    if not bool((decay <= 0).all()):
        raise ValueError(f"expected numbers of 0 or less, got {float(decay.max()):.3g}")
    return torch.log(-decay)


# What a state keeps per step: the file has -exp of it, and its shift under a name of its own.
DECAY = (
    Rule(rf"{_LAYER}A_log", lambda config, decay: _logarithm(config, decay).flatten(), (r"blk.\1.ssm_a",), exact=True),
    Rule(rf"{_LAYER}dt_bias", lambda config, bias: bias, (r"blk.\1.ssm_dt.bias",)),
)
# All norms but that of the gated output have one more.
NORMS = Rule(r"(?!.*linear_attn).*norm\.weight", lambda config, weight: weight - 1, exact=True)
# Mamba's: a number for each channel and each place of its state.
MAMBA_1 = (Rule(rf"{_LAYER}A_log", _logarithm, (r"blk.\1.ssm_a",), exact=True), CONVOLUTION)
# Mamba-2's: vectors are matrices in the file.
MAMBA = (*DECAY, CONVOLUTION, Rule(rf"{_LAYER}(?:D|norm\.weight)", lambda config, rows: rows.flatten()))


def _by_key_head(config: Any, both: Tensor, gate: Tensor) -> Tensor:
    """All queries, all keys, all values; all gates -> each key head's query, key, values and gates. Rows."""
    heads, keys = config.linear_num_key_heads, config.linear_num_key_heads * config.linear_key_head_dim
    parts = [*both.split([keys, keys, len(both) - 2 * keys]), gate]
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _grouped(config: Any, values: Tensor) -> Tensor:
    """Rows of value heads: the first of every key head, then the second, ... -> all of each key head together."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    return values.unflatten(0, (heads // keys, keys, -1)).transpose(0, 1).flatten(0, 2)


def _grouped_values(config: Any, rows: Tensor) -> Tensor:
    """The same for the values that lie behind all queries and keys."""
    ahead = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat([rows[:ahead], _grouped(config, rows[ahead:])])


# Two tensors for queries to gates since 2026, one as in the model before.
QWEN3_NEXT = (
    *DECAY,
    CONVOLUTION,
    NORMS,
    Rule(rf"{_LAYER}in_proj_qkvz\.weight", _by_key_head, (r"blk.\1.attn_qkv.weight", r"blk.\1.attn_gate.weight")),
    Rule(rf"{_LAYER}in_proj_qkvz\.weight", lambda config, rows: rows, (r"blk.\1.ssm_in.weight",)),
)
QWEN3_5 = (
    Rule(
        rf"{_LAYER}A_log",
        lambda config, decay: _logarithm(config, _grouped(config, decay)),
        (r"blk.\1.ssm_a",),
        exact=True,
    ),
    Rule(rf"{_LAYER}dt_bias", _grouped, (r"blk.\1.ssm_dt.bias",)),
    Rule(rf"{_LAYER}conv1d\.weight", lambda config, rows: _grouped_values(config, rows).unsqueeze(1)),
    Rule(rf"{_LAYER}in_proj_qkv\.weight", _grouped_values),
    Rule(rf"{_LAYER}in_proj_[zab]\.weight", _grouped),
    Rule(rf"{_LAYER}out_proj\.weight", lambda config, columns: _grouped(config, columns.T).T),
    NORMS,
)


def _stacked(config: Any, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat([gate, up])


_BLOCK = r"model\.layers\.(\d+)\."
# What all tokens take beside the experts stands under other names where there are none.
GRANITE = (
    *MAMBA,
    Rule(rf"{_BLOCK}block_sparse_moe\.router\.weight", lambda config, rows: rows, (r"blk.\1.ffn_gate_inp.weight",)),
    Rule(
        rf"{_BLOCK}shared_mlp\.input_linear\.weight",
        _stacked,
        (r"blk.\1.ffn_gate_shexp.weight", r"blk.\1.ffn_up_shexp.weight"),
    ),
    Rule(rf"{_BLOCK}shared_mlp\.input_linear\.weight", _stacked, (r"blk.\1.ffn_gate.weight", r"blk.\1.ffn_up.weight")),
    Rule(rf"{_BLOCK}shared_mlp\.output_linear\.weight", lambda config, rows: rows, (r"blk.\1.ffn_down_shexp.weight",)),
    Rule(rf"{_BLOCK}shared_mlp\.output_linear\.weight", lambda config, rows: rows, (r"blk.\1.ffn_down.weight",)),
)
# Rows of queries and keys stay in the order of the file: without positions any order of both gives the same scores.
NEMOTRON = (
    *MAMBA,
    SCORES,
    Rule(rf"{_LAYER}experts\.(up|down)_proj", lambda config, weight: weight, (r"blk.\1.ffn_\2_exps.weight",)),
)

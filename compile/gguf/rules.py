"""How the weights of a file become those of a model, where the converter changed them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How a parameter is made of tensors of the file. Of several rules for a name, the first whose sources the file has
    is used."""

    pattern: str  # of a parameter's whole name in transformers
    make: Callable[..., Tensor]  # config and the source tensors -> the parameter
    # Names in the file, with the pattern's groups as \1, \2; empty: the name in gguf's table.
    sources: tuple[str, ...] = ()
    exact: bool = False  # made in float32, whatever the parameter's dtype


def _halves(heads: int, rows: Tensor) -> Tensor:
    """Rows of heads whose pairs lie side by side, as ggml rotates them -> first halves, then second halves."""
    return rows.unflatten(0, (heads, rows.shape[0] // heads // 2, 2)).transpose(1, 2).flatten(0, 2)


def _transposed(config: Any, weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2)


_EXPERT = r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.experts\."
HALVES_OF_HEADS = (
    Rule(r".*\.q_proj\.(weight|bias)", lambda config, rows: _halves(config.num_attention_heads, rows)),
    Rule(r".*\.k_proj\.(weight|bias)", lambda config, rows: _halves(config.num_key_value_heads, rows)),
)
# Gemma multiplies by one more than its weight: a sum that was rounded to bfloat16 has lost most of it.
ONE_LESS = Rule(r".*norm\.weight", lambda config, weight: weight - 1, exact=True)
EXPERTS = (
    Rule(
        rf"{_EXPERT}gate_up_proj",
        lambda config, gate, up: torch.cat([gate, up], 1),
        (r"blk.\1.ffn_gate_exps.weight", r"blk.\1.ffn_up_exps.weight"),
    ),
    Rule(rf"{_EXPERT}gate_up_proj", lambda config, both: both, (r"blk.\1.ffn_gate_up_exps.weight",)),
    Rule(rf"{_EXPERT}down_proj", lambda config, down: down, (r"blk.\1.ffn_down_exps.weight",)),
)
# Keys and values of all heads from the latent vector: in two tensors, that of keys turned, or in one.
LATENT = (
    Rule(
        r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight",
        lambda config, keys, values: torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1),
        (r"blk.\1.attn_k_b.weight", r"blk.\1.attn_v_b.weight"),
    ),
    Rule(
        r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight",
        lambda config, both: both,
        (r"blk.\1.attn_kv_b.weight",),
    ),
)
SHARED_EXPERT = Rule(r".*\.mlp\.shared_expert_gate\.weight", lambda config, weight: weight.reshape(1, -1))
CONVOLUTION = Rule(r".*\.(conv\.conv|conv1d)\.weight", lambda config, weight: weight.unsqueeze(1))
# Norms of the queries and keys of each head, in a tensor of all of them.
NORMS_OF_HEADS = tuple(
    Rule(
        rf"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.{head}\.weight",
        lambda config, norms, head=head: norms[head],
        (r"blk.\1.attn_\2_norm.weight",),
    )
    for head in range(128)
)
GPT2 = (Rule(r".*\.(c_attn|c_proj|c_fc)\.weight", _transposed),)
GPT_OSS = (
    Rule(
        rf"{_EXPERT}gate_up_proj",
        lambda config, gate, up: torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2),
        (r"blk.\1.ffn_gate_exps.weight", r"blk.\1.ffn_up_exps.weight"),
    ),
    Rule(
        rf"{_EXPERT}gate_up_proj_bias",
        lambda config, gate, up: torch.stack([gate, up], 2).flatten(1, 2),
        (r"blk.\1.ffn_gate_exps.bias", r"blk.\1.ffn_up_exps.bias"),
    ),
    Rule(rf"{_EXPERT}down_proj", _transposed, (r"blk.\1.ffn_down_exps.weight",)),
    Rule(rf"{_EXPERT}down_proj_bias", lambda config, bias: bias, (r"blk.\1.ffn_down_exps.bias",)),
    Rule(r"model\.layers\.(\d+)\.self_attn\.sinks", lambda config, sinks: sinks, (r"blk.\1.attn_sinks.weight",)),
)
LLAMA_4 = (
    Rule(
        rf"{_EXPERT}gate_up_proj",
        lambda config, gate, up: torch.cat([gate, up], 1).transpose(1, 2),
        (r"blk.\1.ffn_gate_exps.weight", r"blk.\1.ffn_up_exps.weight"),
    ),
    Rule(rf"{_EXPERT}down_proj", _transposed, (r"blk.\1.ffn_down_exps.weight",)),
)
SCORES = Rule(
    r"model\.layers\.(\d+)\.(?:(?:mlp|mixer)\..*e_score_correction|feed_forward\.expert)_bias",
    lambda config, bias: bias,
    (r"blk.\1.exp_probs_b.bias",),
)

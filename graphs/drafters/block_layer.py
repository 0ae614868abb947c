"""The decoder layer of block drafters, under the names of published checkpoints.

Letters: B batch, T tokens, Q slots of a block, H the drafter's hidden size, G groups of its numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from ..attention import Pass

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LayerMask:
    """What a layer's slots see: the slots up to their own or all of the block, and of the text all or, of what comes
    less than `window` positions ahead of them, 0 for all."""

    causal: bool
    window: int = 0


class BlockAttention(nn.Module):
    """Attention of a block's slots to the committed positions and to each other, with norms on queries and keys."""

    def __init__(self, config: LlamaConfig, mask: LayerMask):
        super().__init__()
        self.size, self.mask = config.head_dim, mask
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=bias)
        self.q_norm = LlamaRMSNorm(self.size, config.rms_norm_eps)
        self.k_norm = LlamaRMSNorm(self.size, config.rms_norm_eps)

    def keys_and_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> [B, H_kv, T, size] of both."""
        key, value = (project(x).unflatten(2, (-1, self.size)) for project in (self.k_proj, self.v_proj))
        return rotated(self.k_norm(key), rotary), value.transpose(1, 2)

    def forward(self, x: Tensor, rotary: Rotary, where: Pass, keys: Tensor, values: Tensor) -> Tensor:
        """x [B, Q, H], a layer's cache that holds the keys and values of the block, too -> [B, Q, H]."""
        query = rotated(self.q_norm(self.q_proj(x).unflatten(2, (-1, self.size))), rotary)
        out = where.attention(query, keys, values, self.size**-0.5, self.mask.window, 0.0, None)
        return self.o_proj(out.flatten(2))


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, T, heads, size] -> [B, heads, T, size], turned by its positions."""
    x = x.transpose(1, 2)
    return apply_rotary_pos_emb(x, x, *rotary)[0]


class BlockConvolution(nn.Module):
    """Short convolutions over a block's slots, around what a layer computes of them: of each group of numbers a slot
    itself says by how much its own and those of the slots ahead of it count.

    Source: DFlash2, z-lab/dflash. Nothing stands ahead of the block's first slot.
    """

    def __init__(self, size: int, taps: int, group: int):
        """taps: how many slots are summed, the own one first; group: how many numbers a group has."""
        super().__init__()
        self.taps = taps
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))  # of what comes in, and of what goes out
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, Q, H], what is computed of such a block -> [B, Q, H]."""
        own = self.kernel_projection(x).unflatten(2, (2, self.taps, -1))
        before, after = own.unbind(2)  # [B, Q, taps, G] each
        return self._convolve(compute(self._convolve(x, before, 0)), after, 1)

    def _convolve(self, x: Tensor, own: Tensor, side: int) -> Tensor:
        slots, groups = x.shape[1], own.shape[3]
        total = torch.zeros_like(x)
        for tap in range(self.taps):
            ahead = pad(x, (0, 0, tap, 0))[:, :slots]
            weighed = ahead.unflatten(2, (groups, -1)) * own[:, :, tap, :, None]
            total = total + ahead * self.base_kernel[side, tap] + weighed.flatten(2)
        return total


class BlockLayer(nn.Module):
    """A layer as Qwen3's. What comes of the target's features is not normed at its input."""

    def __init__(self, config: LlamaConfig, mask: LayerMask, convolution: tuple[int, int] | None = None):
        """convolution: taps and group of `BlockConvolution`, around the attention and the MLP, None for none."""
        super().__init__()
        self.self_attn = BlockAttention(config, mask)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv = self.mlp_conv = None
        if convolution is not None:
            self.attention_conv = BlockConvolution(config.hidden_size, *convolution)
            self.mlp_conv = BlockConvolution(config.hidden_size, *convolution)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """x [B, Q, H], a block; attend: its normed slots -> what its attention makes of them -> [B, Q, H]."""
        x = x + through(self.attention_conv, self.input_layernorm(x), attend)
        return x + through(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def through(convolution: BlockConvolution | None, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What is computed of x, within convolutions where there are some."""
    return compute(x) if convolution is None else convolution(x, compute)

"""The decoder layer of heads that read the target's hidden states, under the names of published checkpoints.

Letters: B batch, T tokens, Q of them whose outputs are wanted, H the head's hidden size, W the width of its input.
"""

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from ..attention import LayerCache, Pass, attend


class Attention(nn.Module):
    """Causal attention whose input may be wider than its output."""

    def __init__(self, config: LlamaConfig, width: int, input_bias: bool, input_norms: bool, window: int):
        """input_bias: whether queries, keys and values have biases; input_norms: whether queries and keys are normed,
        as in Qwen3; window: how many tokens a query sees, itself among them, 0 for all."""
        super().__init__()
        self.size, self.window = config.head_dim, window
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=input_bias)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=input_bias)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=input_bias)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=config.attention_bias)
        norms = [LlamaRMSNorm(self.size, config.rms_norm_eps) if input_norms else nn.Identity() for _ in "qk"]
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], where: Pass, cache: LayerCache) -> Tensor:
        """x [B, T, W] -> [B, Q, H] of the wanted outputs; the keys and values of all tokens go to the cache's first
        layer."""
        query, key, value = (
            norm(project(x).unflatten(2, (-1, self.size))).transpose(1, 2)
            for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, nn.Identity()))
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        keys, values = cache.update(key, value, 0)
        out, _ = attend(self, query, keys, values, None, attention_pass=where, sliding_window=self.window)
        return self.o_proj(out.flatten(2))


class HeadLayer(nn.Module):
    """A Llama layer whose input is normed by whoever calls it, if at all."""

    def __init__(self, config: LlamaConfig, width: int, input_bias: bool, input_norms: bool = False, window: int = 0):
        super().__init__()
        self.self_attn = Attention(config, width, input_bias, input_norms, window)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def run(self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], where: Pass, cache: LayerCache) -> Tensor:
        """x [B, T, W], and what its attention is added to [B, Q, H] -> hidden [B, Q, H]."""
        hidden = residual + self.self_attn(x, rotary, where, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

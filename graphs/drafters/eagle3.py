"""EAGLE-3: one decoder layer over the target's hidden states, with its own output fed back at deeper levels.

Source: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1's `fc_norm` and `norm_output` (arXiv 2605.09992). Position p of the
head pairs the target's feature at p with the token at p + 1, and predicts the token at p + 2.
Letters: B batch, T tokens, F frontier nodes, D greatest depth, H the head's hidden size, K candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ..attention import LayerCache, Pass, attend, chain_pass
from ..state import State, StateTensor
from ..target import CacheLayer
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer, most_catch_up, owed_positions
from .frontier import FrontierPasses, drafting, embeddable
from .shared_noise import BestTokens


@dataclass(frozen=True)
class Eagle3Config:
    """The architecture of a head. `layer` is the config of its one decoder layer, as a Llama layer."""

    layer: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]  # indices of the target's hidden states that are the features
    fc_norm: bool = False  # EAGLE-3.1: a norm on each feature ahead of fc
    norm_before_fc: bool = False  # one norm over all features ahead of fc
    norm_output: bool = False  # EAGLE-3.1: the normed hidden state is fed back
    norm_before_residual: bool = False  # the residual starts from the normed hidden state


class Attention(nn.Module):
    """Causal attention whose input is twice as wide as its output."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.size = config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], where: Pass, cache: LayerCache) -> Tensor:
        """x [B, T, 2H] -> [B, Q, H] of the wanted outputs; the keys and values of all tokens go to the cache's first
        layer."""
        query, key, value = (
            project(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        keys, values = cache.update(key, value, 0)
        out, _ = attend(self, query, keys, values, None, attention_pass=where)
        return self.o_proj(out.flatten(2))


class MidLayer(nn.Module):
    """The head's decoder layer; its names are those of published checkpoints."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.self_attn = Attention(config.layer)
        self.mlp = LlamaMLP(config.layer)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], where: Pass, cache: LayerCache
    ) -> Tensor:
        """embedded, hidden [B, T, H] -> hidden [B, Q, H] of the wanted outputs."""
        normed = self.hidden_norm(hidden)
        residual = where.outputs_of(normed if self.norm_before_residual else hidden)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = residual + self.self_attn(both, rotary, where, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """The trained part: parameters only, named as in published checkpoints."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        count = len(config.feature_layers)
        self.config = config
        self.fc = nn.Linear(count * config.target_hidden_size, size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(config.target_hidden_size, eps) for _ in range(count))
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(count * config.target_hidden_size, eps)
        self.midlayer = MidLayer(config)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = LlamaRotaryEmbedding(config.layer)

    def fuse(self, features: Tensor) -> Tensor:
        """Captured features [B, T, features * H_target] -> hidden states [B, T, H]."""
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def target_ids(self) -> Tensor:
        """What the draft vocabulary's tokens are called by the target: int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """embedded, hidden [B, T, H] -> (normed, for the logits; hidden, for the next level), both [B, Q, H] of the
        wanted outputs."""
        hidden = self.midlayer(embedded, hidden, self.rotary(hidden, where.positions), where, cache)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


class Eagle3(Scorer):
    """Scores with an EAGLE-3 head.

    Its cache holds `draft_lengths` positions made of true features. A step first runs the head over the features of
    the tokens committed since, and overwrites what rejected drafts left there; the last of them scores the root's
    children. The features of the last positions are kept in `recent`, position p at p modulo its size, for steps that
    leave the head out.
    """

    pauses = True
    skippable = True

    def __init__(self, head: Eagle3Head, embed: nn.Embedding):
        """embed: token ids -> [.., H]; the target's own embeddings unless the checkpoint brings others."""
        super().__init__()
        self.head, self.embed = head, embed
        self.feature_layers = head.config.feature_layers

    def cache_layers(self) -> list[CacheLayer]:
        layer = self.head.config.layer
        return [CacheLayer(layer.num_key_value_heads, layer.head_dim, layer.head_dim)]

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        width, dtype = self.head.fc.in_features, self.head.fc.weight.dtype
        recent = StateTensor((most_catch_up(shape), width), dtype, in_place=True)
        return {"draft_lengths": StateTensor((), torch.int64), "recent": recent}

    def prefill(
        self,
        tokens: Tensor,
        count: Tensor,
        where: Pass,
        state: State,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        features: Tensor | None,
    ) -> State:
        assert features is not None
        start = state["lengths"]
        index = start[:, None] + torch.arange(1, tokens.shape[1] + 1, device=start.device)
        following = state["history"].gather(1, index)
        self._run(following, self.head.fuse(features), where, keys, values)
        # The last position stays pending: the first tree needs the head's answer there.
        last, end = (count - 1)[:, None, None].expand(-1, 1, features.shape[2]), start + count - 1
        self._remember(features.gather(1, last), end, state["recent"])
        return {"draft_lengths": end}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted = drafting(state)
        passes = FrontierPasses(state["lengths"], wanted)
        best = BestTokens(state, shape.top_k, self.head.target_ids(), wanted)
        self._remember(state["features"], state["lengths"] - state["moved"], state["recent"])
        normed, hidden, lengths = self._catch_up(state, keys, values)
        children = best(self.head.lm_head(normed))
        known = lengths > state["draft_lengths"]

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal hidden
            parent = hidden.gather(1, parents[:, :, None].expand(-1, -1, hidden.shape[2]))
            normed, hidden = self._run(tokens, parent, passes.extend(parents), keys, values)
            return best(self.head.lm_head(normed))

        children = Candidates(children.tokens, children.log_probs.masked_fill(~known[:, None, None], float("-inf")))
        return children, expand, {"draft_lengths": lengths}

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        assert features is not None
        return {"features": features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))}

    def _remember(self, features: Tensor, first: Tensor, recent: Tensor) -> None:
        """Write features [B, T, F] of the positions from first [B] on to `recent`. What comes of rejected nodes lies
        behind the others, where the next step's will be."""
        place = (first[:, None] + torch.arange(features.shape[1], device=first.device)) % recent.shape[1]
        row = torch.arange(features.shape[0], device=first.device)[:, None]
        recent.index_put_((row, place), features.to(recent.dtype))

    def _catch_up(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run over the positions since `draft_lengths`, the last ones where they are more than the step says -> the
        normed and the plain hidden state [B, 1, H] of the last one, and what `draft_lengths` is now."""
        lengths, recent, wanted = state["lengths"], state["recent"], drafting(state)
        start, index, last = owed_positions(state, lengths)
        tokens = state["history"].gather(1, index + 1)
        place = (index % recent.shape[1])[:, :, None].expand(-1, -1, recent.shape[2])
        where = chain_pass(start, index.shape[1], recent.shape[1], wanted, last)
        features = where.zeros_unless_wanted(recent.gather(1, place))
        normed, hidden = self._run(tokens, self.head.fuse(features), where, keys, values)
        return normed, hidden, lengths.where(wanted, state["draft_lengths"])

    def _run(
        self, tokens: Tensor, hidden: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        embedded = where.zeros_unless_wanted(self.embed(embeddable(tokens, self.embed.num_embeddings)))
        return self.head(embedded, hidden, where, LayerCache(keys, values, where.slots))

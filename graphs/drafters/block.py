"""Block drafters: a few layers that say a block of tokens in one pass, over what the target made of the text.

Source: DFlash (arXiv 2602.06036); JetSpec, whose block is causal; DSpark (arXiv 2607.05147), whose first slot says the
first token; DFlash2, whose layers convolve. The keys and values of each layer at a committed position are made of the
target's features there, and of nothing else. A block is the root and masks: its slots attend to the committed positions
and to each other, and nothing of it is kept.
Letters: B batch, C positions to catch up, Q slots of a block, D greatest depth, H the drafter's hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ...kernels.bits import chain_bits, word_count
from ..attention import LayerCache, Pass, chain_pass
from ..kept import CacheLayer
from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .all_depths import begun
from .block_layer import BlockLayer, LayerMask
from .correction import Correction
from .drafter import Unsaid, owed_positions
from .frontier import drafting, embeddable, no_candidates
from .recurrent import CatchingUp, RecurrentHead
from .shared_noise import BestTokens


@dataclass(frozen=True)
class BlockConfig:
    """The architecture of a drafter."""

    layer: LlamaConfig  # config of each layer, as a Llama layer
    feature_layers: tuple[int, ...]  # indices of the target's hidden states that are the features
    target_hidden_size: int  # width of one hidden state of the target
    masks: tuple[LayerMask, ...]  # of each layer
    block_size: int  # slots of a block
    most_depth: int  # how many tokens a block says: as many as it has slots, or one less
    mask_token: int  # id that stands for a token not known yet
    from_anchor: bool  # whether slot k says what follows the k-th token behind the root, else the k-th token itself
    convolution: tuple[int, int] | None = None  # see `BlockLayer`
    multiplier: float = 1.0  # of the logits
    softcap: float = 0.0  # what they stay below, 0 for no bound
    shift_unsaid: bool = False  # whether the publisher does not say which of the two
    mask_unsaid: bool = False  # or whether slots of sliding layers see those behind them
    other_layers: tuple[int, ...] | None = None  # what else `feature_layers` may be


class BlockHead(RecurrentHead):
    """The trained part, named as in published checkpoints."""

    def __init__(self, config: BlockConfig, lm_head: Any, correction: Correction | None = None, d2t: bool = False):
        """lm_head: hidden states -> logits, the target's own head unless the checkpoint brings another; correction:
        what the token ahead adds to the logits; d2t: whether the drafter has other tokens than the target, see
        `target_ids`."""
        super().__init__()
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.config, self.feature_layers, self.other_layers = config, config.feature_layers, config.other_layers
        self.width = len(config.feature_layers) * config.target_hidden_size
        self.cache_layer = CacheLayer(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        self.fc, self.hidden_norm = nn.Linear(self.width, size, bias=False), LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(layer, mask, config.convolution) for mask in config.masks)
        self.norm = LlamaRMSNorm(size, eps)
        self.lm_head, self.correction = lm_head, correction
        self.d2t: Tensor | None
        draft_tokens = lm_head.weight.shape[0] if d2t else 0
        self.register_buffer("d2t", torch.zeros(draft_tokens, dtype=torch.int64) if d2t else None)
        self.rotary = LlamaRotaryEmbedding(layer)

    def unsaid(self) -> list[Unsaid]:
        asked = ((self.config.shift_unsaid, self._shift), (self.config.mask_unsaid, self._mask))
        return [describe() for unsaid, describe in asked if unsaid]

    def _shift(self) -> Unsaid:
        """Which slots say the depths. A root that says nothing leaves a block one depth less than it has slots."""
        usual = self.config
        depth = min(usual.most_depth, usual.block_size - 1)
        other = replace(usual, from_anchor=not usual.from_anchor, most_depth=depth)

        def swap() -> None:
            self.config = usual if self.config is other else other

        ways = ("sample_from_anchor false", "sample_from_anchor true")
        return Unsaid(ways[usual.from_anchor], ways[other.from_anchor], swap)

    def _mask(self) -> Unsaid:
        """Whether slots of sliding layers see those behind them."""
        attentions = [layer.self_attn for layer in self._layers() if layer.self_attn.mask.window]
        ways, causal = ("sliding layers not causal", "sliding layers causal"), attentions[0].mask.causal

        def swap() -> None:
            for attention in attentions:
                attention.mask = replace(attention.mask, causal=not attention.mask.causal)

        return Unsaid(ways[causal], ways[not causal], swap)

    def fuse(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def target_ids(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, normed: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(normed)
        bound = self.config.softcap
        if self.config.multiplier != 1.0:
            logits = logits * self.config.multiplier
        return torch.tanh(logits / bound) * bound if bound else logits

    def keep(self, context: Tensor, where: Pass, cache: LayerCache) -> None:
        """Write what the layers make of committed positions; context [B, C, H], as `fuse` gives it."""
        rotary = self.rotary(context, where.positions)
        for index, layer in enumerate(self._layers()):
            cache.update(*layer.self_attn.keys_and_values(context, rotary), index)

    def block(self, embedded: Tensor, masks: dict[bool, Pass], cache: LayerCache) -> Tensor:
        """embedded [B, Q, H], a block; masks: the passes of causal layers and of others -> normed [B, Q, H]."""
        x, rotary = embedded, self.rotary(embedded, masks[False].positions)
        for index, layer in enumerate(self._layers()):

            def attend(slots: Tensor, index: int = index, attention: Any = layer.self_attn) -> Tensor:
                caches = cache.update(*attention.keys_and_values(slots, rotary), index)
                attended: Tensor = attention(slots, rotary, masks[attention.mask.causal], *caches)
                return attended

            x = layer(x, attend)
        return self.norm(x)

    def _layers(self) -> list[Any]:
        return list(self.layers)


class BlockDrafter(CatchingUp):
    """Scores with a block: one pass a step, over the features of the positions since the last and a block that is as
    long as the tree is deep."""

    all_at_once = True
    head: BlockHead

    def __init__(self, head: BlockHead, embed: nn.Embedding):
        super().__init__(head, embed)
        self.most_depth = head.config.most_depth

    def cache_layers(self) -> list[CacheLayer]:
        return super().cache_layers() * len(self.head.layers)

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
        self.head.keep(self.head.fuse(features), where, LayerCache(keys, values, where.slots))
        return {"draft_lengths": state["lengths"] + count}

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted = drafting(state)
        best = BestTokens(state, shape.top_k, self.head.target_ids(), wanted)
        self.remember(state["features"], state["lengths"] - state["moved"], state["recent"])
        normed = self._block(state, keys, values, max(1, min(shape.depth, self.head.config.most_depth)))
        lengths = state["lengths"].where(wanted, state["draft_lengths"])
        known, logits = lengths > state["draft_lengths"], self.head.logits(normed).split(1, 1)
        if self.head.correction is None:
            children, expand = begun([best(depth) for depth in logits], known, shape.top_k)
        else:
            root = state["history"].gather(1, state["lengths"][:, None])
            expand = corrected(self.head.correction, self.embedded, best, normed.split(1, 1), logits, shape.top_k)
            children = expand(root, torch.zeros_like(root)).where(known)
        return children, expand, {"draft_lengths": lengths}

    def embedded(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embed(embeddable(tokens, self.embed.num_embeddings))
        return embedded

    def _block(self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], depth: int) -> Tensor:
        """Process the features since `draft_lengths`, of the last positions where they are more than the step says, and
        a block -> the normed hidden states [B, D, H] of the slots that say a depth each."""
        config, lengths, wanted = self.head.config, state["lengths"], drafting(state)
        start, index, _ = owed_positions(state, lengths)  # of those that are not there yet, the block takes the places
        owed = chain_pass(start, index.shape[1], state["recent"].shape[1], wanted)
        context = self.head.fuse(owed.zeros_unless_wanted(self.recalled(state["recent"], index)))
        self.head.keep(context, owed, LayerCache(keys, values, owed.slots))

        slots = depth + config.block_size - config.most_depth
        masks = {causal: block_pass(lengths, slots, causal, wanted) for causal in (False, True)}
        where = masks[False]
        first = 0 if config.from_anchor else 1
        root = state["history"].gather(1, lengths[:, None])
        tokens = root.where(where.depths == 0, config.mask_token)
        embedded = where.zeros_unless_wanted(self.embedded(tokens))
        return self.head.block(embedded, masks, LayerCache(keys, values, where.slots))[:, first : first + depth]


def block_pass(lengths: Tensor, slots: int, causal: bool, wanted: Tensor) -> Pass:
    """A pass over a block behind the committed tokens, each of whose slots sees those up to itself or all."""
    depths = torch.arange(slots, device=lengths.device).expand(lengths.shape[0], -1)
    words = word_count(slots)
    chain = chain_bits(slots, words, lengths.device)
    bits = chain if causal else chain[-1:].expand(slots, words)
    return Pass(lengths, depths, bits.expand(lengths.shape[0], -1, -1), depths, wanted=wanted)


def corrected(
    correction: Correction,
    embed: Callable[[Tensor], Tensor],
    best: BestTokens,
    hidden: Sequence[Tensor],
    logits: Sequence[Tensor],
    top_k: int,
) -> Expand:
    """What scores one frontier after the other, the root's first, from the hidden state [B, 1, H] and the logits [B, 1,
    V] of each depth. Deeper levels get no candidates."""
    level, memory = 0, torch.zeros_like(hidden[0][:, :, :1]).expand(-1, -1, correction.memory)
    logits = [likeliest_alone(depth, correction.among) for depth in logits] if correction.among else logits

    def expand(tokens: Tensor, parents: Tensor) -> Candidates:
        nonlocal level, memory
        if level >= len(logits):
            return no_candidates(tokens, top_k)
        inherited = memory.gather(1, parents[:, :, None].expand(-1, -1, memory.shape[2]))
        given = (tokens, embed(tokens), hidden[level].expand(-1, tokens.shape[1], -1), inherited)
        added, memory = correction(*given)
        level += 1
        own = logits[level - 1].expand(-1, tokens.shape[1], -1)
        return best(own if level <= correction.skipped else own + added)

    return expand


def likeliest_alone(logits: Tensor, count: int) -> Tensor:
    """logits [.., V] -> those of the `count` likeliest tokens, -inf for all others."""
    least = logits.topk(min(count, logits.shape[-1]), -1).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf"))

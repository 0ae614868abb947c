"""P-EAGLE: an EAGLE-3 head of several layers that was trained to say all depths in one pass.

Source: P-EAGLE (arXiv 2602.01469), as speculators trains it. The root pairs with the last feature as in EAGLE-3; behind
it, a mask token pairs with `mask_hidden`, which stands for the features of a position that the target has not seen.
Letters: B batch, D greatest depth, H the head's hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ..attention import ATTENTION_NAME, LayerCache, Pass, chain_pass, register_attention
from ..kept import CacheLayer, cache_name
from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .all_depths import begun, masks_behind, of_depths, with_masks
from .drafter import Unsaid, owed_positions
from .eagle3 import Eagle3Config, Eagle3Head
from .frontier import drafting
from .recurrent import CatchingUp
from .shared_noise import BestTokens


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """layers: decoder layers, EAGLE-3's own among them; mask: the mask token's id."""

    layers: int
    mask: int


class PEagleHead(Eagle3Head):
    """EAGLE-3's layer and plain ones behind it, of Llama or of Qwen3."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        register_attention()
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))
        self.layers = nn.ModuleDict({str(index): plain_layer(config, index) for index in range(1, config.layers)})

    def unsaid_of_levels(self) -> list[Unsaid]:
        return []  # nothing is fed back

    def forward(self, embedded: Tensor, hidden: Tensor, where: Pass, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """embedded, hidden [B, T, H] -> (normed, for the logits; hidden), both [B, T, H]."""
        rotary = self.rotary(hidden, where.positions)
        hidden = self.midlayer(embedded, hidden, rotary, where, cache)
        for index, layer in self.layers.items():
            given = {"position_embeddings": rotary, cache_name(layer): cache, "attention_pass": where}
            if not self.config.input_norms:  # Qwen3's layers know their own
                given["sliding_window"] = self.config.windows[int(index)]
            hidden = layer(hidden, **given)
        return self.norm(hidden), hidden


def plain_layer(config: PEagleConfig, index: int) -> nn.Module:
    """A layer of Llama's, or of Qwen3's, which norms queries and keys."""
    config.layer._attn_implementation = ATTENTION_NAME
    if not config.input_norms:
        return LlamaDecoderLayer(config.layer, index)
    fields = {key: value for key, value in config.layer.to_dict().items() if key not in ("model_type", "layer_types")}
    layer = Qwen3Config(**fields | {"num_hidden_layers": config.layers})
    layer._attn_implementation = ATTENTION_NAME
    made = Qwen3DecoderLayer(layer, index)
    made.self_attn.sliding_window = config.windows[index]
    return made


class PEagle(CatchingUp):
    """Scores with a P-EAGLE head: one pass over the positions since the last, with masks behind the root."""

    all_at_once = True
    head: PEagleHead

    def cache_layers(self) -> list[CacheLayer]:
        return super().cache_layers() * self.head.config.layers

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        best = BestTokens(state, shape.top_k, self.head.target_ids(), drafting(state))
        self.remember(state["features"], state["lengths"] - state["moved"], state["recent"])
        normed, lengths = self._all_depths(state, keys, values, shape)
        levels = [best(depth) for depth in self.head.logits(normed).split(1, 1)]
        return *begun(levels, lengths > state["draft_lengths"], shape.top_k), {"draft_lengths": lengths}

    def _all_depths(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Tensor, Tensor]:
        """Run over the positions since `draft_lengths`, the last ones where they are more than the step says, and masks
        -> the normed hidden states [B, D, H] of the depths, and what `draft_lengths` is now."""
        lengths, recent, wanted, masks = state["lengths"], state["recent"], drafting(state), masks_behind(shape)
        start, index, last = owed_positions(state, lengths)
        tokens = with_masks(state["history"].gather(1, index + 1), last, self.head.config.mask, masks)
        features = with_masks(self.recalled(recent, index), last, self.head.mask_hidden, masks)
        where = chain_pass(start, tokens.shape[1], recent.shape[1] + masks, wanted)
        hidden = self.head.fuse(where.zeros_unless_wanted(features))
        normed, _ = self.run(tokens, hidden, where, keys, values)
        return of_depths(normed, last, masks), lengths.where(wanted, state["draft_lengths"])

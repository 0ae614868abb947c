"""A drafter that attends to the target's own keys and values, and keeps none: the assistants of Gemma 4.

Source: transformers' `gemma4_assistant`. Its layers have queries alone; those of each kind read the keys and values of
the target's last layer of that kind. It takes the target's embedding of a token and a hidden state, the target's behind
the final norm for the root and its own, projected back, for what follows. All nodes stand at the root's position, and a
sliding layer sees what a token there sees; transformers' own mask goes two tokens farther back.
Letters: B batch, F frontier nodes, H the target's hidden size, K its layers' kinds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Pass
from ..state import State
from ..tree import Candidates, Expand, TreeShape
from .drafter import Scorer
from .frontier import drafting
from .position_heads import last_committed
from .shared_noise import BestTokens

Caches = Mapping[str, tuple[Tensor, Tensor]]  # keys and values by the kinds of the layers that read them


class SharedCache(Scorer):
    """Scores with such an assistant, one pass for each level."""

    pauses = True
    skippable = True

    def __init__(self, assistant: Any, embed: nn.Embedding, feature_layer: int, caches: Mapping[str, int]):
        """assistant: transformers' model; embed: the target's; feature_layer: the index of its hidden state behind the
        final norm; caches: kind of a layer -> which of the target's cache layers it reads."""
        super().__init__()
        self.assistant, self.embed, self.feature_layers = assistant, embed, (feature_layer,)
        self.kinds, self.target_caches = tuple(caches), tuple(caches.values())

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        wanted, root = drafting(state), state["history"].gather(1, state["lengths"][:, None])
        best = BestTokens(state, shape.top_k, None, wanted)
        caches = {kind: (keys[place], values[place]) for place, kind in enumerate(self.kinds)}
        hidden = state["hidden"]

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal hidden
            parent = hidden.gather(1, parents[:, :, None].expand(-1, -1, hidden.shape[2]))
            normed = self.normed(tokens, parent, caches, at_root(state["lengths"], tokens, wanted))
            hidden = self.assistant.post_projection(normed)
            return best(self.logits(normed))

        return expand(root, torch.zeros_like(root)), expand, {}

    def commit(self, state: State, path: Tensor, features: Tensor | None) -> State:
        return {"hidden": last_committed(state, path, features)}

    def normed(self, tokens: Tensor, hidden: Tensor, caches: Caches, where: Pass) -> Tensor:
        """tokens [B, F], the hidden states that they are paired with [B, F, H] -> [B, F, the assistant's size]."""
        model = self.assistant.model
        both = torch.cat([self.embed(tokens), hidden], -1)
        x = self.assistant.pre_projection(where.zeros_unless_wanted(both))
        for layer in model.layers:
            given: dict[str, Any] = {
                "shared_kv_states": caches,
                "position_embeddings": model.rotary_emb(x, where.positions, layer.self_attn.layer_type),
                "attention_mask": None,
                "position_ids": where.positions,
                "attention_pass": where,
            }
            x = layer(x, None, **given)
        normed: Tensor = model.norm(x)
        return normed

    def logits(self, normed: Tensor) -> Tensor:
        """[B, F, the assistant's size] -> [B, F, V]; of an ordered vocabulary the tokens of the best clusters alone."""
        logits: Tensor = self.assistant.lm_head(normed)
        clusters = self.assistant.masked_embedding
        if clusters is None:
            return logits
        best = clusters.centroids(normed).topk(clusters.centroid_intermediate_top_k, -1).indices
        members = clusters.token_ordering.view(clusters.num_centroids, -1)[best].flatten(2)
        return torch.full_like(logits, float("-inf")).scatter(2, members, logits.gather(2, members))


def at_root(lengths: Tensor, tokens: Tensor, wanted: Tensor) -> Pass:
    """A pass over tokens [B, F] that all stand at the root's position and see what is committed, nothing else."""
    depths = torch.zeros_like(tokens)
    nothing = torch.zeros_like(tokens[:, :, None], dtype=torch.int32)
    return Pass(lengths, depths, nothing, depths[:, :1], wanted=wanted)

"""Several modules for multi-token prediction, of which each says one depth: module 0 the first, module k depth k + 1.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2. Module k at position p takes the token at p + k + 1 and a hidden
state of p: module k - 1's output there, where modules are chained, else the target's own, as MiMo-V2 has it. It says
what comes at p + k + 2. So a node at depth d stands in module k at the root's position less 1 + k - d, and every module
from d on needs its keys: a level runs its module over all nodes above it. When the root is at position L, module k has
L - k entries that are made of the text; drafts made those behind them, and the next step makes them again.
Letters: B batch, C positions to catch up, W those and the ones that are made again, F frontier nodes, M nodes drafted
so far, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...kernels.bits import pack_bits
from ..attention import LayerCache, Pass, chain_pass
from ..kept import CacheLayer
from ..state import State, StateTensor
from ..tree import Candidates, Expand, TreeShape
from .drafter import Unsaid, most_catch_up, owed_positions
from .frontier import FrontierPasses, drafting, embeddable, no_candidates
from .mtp import MtpHead
from .recurrent import CatchingUp
from .shared_noise import BestTokens


class MtpModules(CatchingUp):
    """Scores with such modules, a level with each: none was trained for a depth behind the last one's."""

    def __init__(self, heads: Sequence[MtpHead], embed: nn.Embedding, chained: bool):
        super().__init__(heads[0], embed)
        self.further, self.chained = nn.ModuleList(heads[1:]), chained
        self.most_depth = self.lookahead = len(heads)

    def unsaid(self) -> list[Unsaid]:
        order, *rest = super().unsaid()
        each = [head.unsaid()[0] for head in self.heads()]

        def swap() -> None:
            for way in each:
                way.swap()

        return [order._replace(swap=swap), *rest]

    def heads(self) -> list[MtpHead]:
        return [self.head, *self.further]

    def cache_layers(self) -> list[CacheLayer]:
        return [head.cache_layer for head in self.heads()]

    def used(self, shape: TreeShape) -> int:
        """How many modules a tree needs."""
        return max(1, min(shape.depth, len(self.heads())))

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        places = most_catch_up(shape) + self.used(shape) - 1
        recent = StateTensor((places, self.head.width), self.embed.weight.dtype, in_place=True)
        return super().state(shape) | {"recent": recent}

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
        index = state["lengths"][:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.run_all(self.heads(), index, features, where, state["history"], keys, values)
        # Places ahead of the chunk take its first position, which is written in any case.
        most = min(len(self.heads()), state["recent"].shape[1])
        places = (count[:, None] - most + torch.arange(most, device=count.device)).clamp(min=0)
        self.remember_at(features.gather(1, spread(places, features)), index.gather(1, places), state["recent"])
        return {"draft_lengths": state["lengths"] + count}

    def run_all(
        self,
        heads: Sequence[MtpHead],
        index: Tensor,
        features: Tensor,
        where: Pass,
        history: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> list[Tensor]:
        """Run modules one after the other over positions [B, W] of the text with the target's features [B, W, H] ->
        the output [B, W, H] of each. What stands behind the text in `history` is not meant."""
        outputs, hidden = [], features
        for place in range(len(heads)):
            following = history.gather(1, (index + place + 1).clamp(max=history.shape[1] - 1))
            outputs.append(self.outputs(place, following, hidden, where, keys, values))
            hidden = outputs[-1] if self.chained else features
        return outputs

    def outputs(
        self, place: int, tokens: Tensor, hidden: Tensor, where: Pass, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """What module `place` makes of tokens [B, T] and hidden states [B, T, H]."""
        embedded = where.zeros_unless_wanted(self.embed(embeddable(tokens, self.embed.num_embeddings)))
        cache = LayerCache(keys[place : place + 1], values[place : place + 1], where.slots)
        return self.heads()[place](embedded, hidden, where, cache)[0]

    def begin(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> tuple[Candidates, Expand, State]:
        lengths, wanted, used = state["lengths"], drafting(state), self.used(shape)
        best = BestTokens(state, shape.top_k, self.head.target_ids(), wanted)
        roots = self.at_roots(state, keys, values, shape)
        now = lengths.where(wanted, state["draft_lengths"])
        children = best(self.head.logits(roots[0])).where(now > state["draft_lengths"])
        nodes, made = Nodes(lengths, wanted), roots[0]

        def expand(tokens: Tensor, parents: Tensor) -> Candidates:
            nonlocal made
            place = nodes.add(tokens, parents)
            if place >= used:
                return no_candidates(tokens, shape.top_k)
            where = nodes.over(place)
            if self.chained:
                hidden = made.gather(1, spread(nodes.parents + 1, made))
            else:
                hidden = where.zeros_unless_wanted(self.recalled(state["recent"], where.positions))
            own = self.outputs(place, nodes.tokens, hidden, where, keys, values)
            made = torch.cat([roots[place], own], 1)
            found = best(self.heads()[place].logits(own[:, -tokens.shape[1] :]))
            # The root, at index `lengths`, has a place in this module if so many tokens are ahead of it.
            return found.where(lengths > place)

        return children, expand, {"draft_lengths": now}

    def at_roots(
        self, state: State, keys: Sequence[Tensor], values: Sequence[Tensor], shape: TreeShape
    ) -> list[Tensor]:
        """Run the modules that a tree needs over the positions since `draft_lengths`, the last ones where they are more
        than the step says, and over those that are made again -> the output [B, 1, H] of each where it takes the
        root."""
        lengths, recent, wanted, used = state["lengths"], state["recent"], drafting(state), self.used(shape)
        self.remember(state["features"], lengths - state["moved"], recent)
        start, owed, _ = owed_positions(state, lengths)
        first, width = (start - used + 1).clamp(min=0), owed.shape[1] + used - 1
        index = first[:, None] + torch.arange(width, device=first.device)
        where = chain_pass(first, width, recent.shape[1], wanted)
        features = where.zeros_unless_wanted(self.recalled(recent, index))
        outputs = self.run_all(self.heads()[:used], index, features, where, state["history"], keys, values)
        last = lengths - 1 - first
        return [
            made.gather(1, spread((last - place).clamp(min=0)[:, None], made)) for place, made in enumerate(outputs)
        ]


class Nodes:
    """The nodes that were expanded so far, level after level."""

    def __init__(self, lengths: Tensor, wanted: Tensor):
        self.lengths, self.wanted = lengths, wanted
        self.tokens = lengths[:, None][:, :0]  # [B, M]
        self.level, self.frontiers = 0, FrontierPasses(lengths)
        self.ancestors: list[Tensor] = []  # of each level, [B, F, M at that level]

    @property
    def parents(self) -> Tensor:
        """[B, M] int64 number of each node's parent, -1 for the root."""
        return self.frontiers.parents

    @property
    def depths(self) -> Tensor:
        """[B, M] int64 depth of each node, 0 for the root's children."""
        return self.frontiers.depths

    def add(self, tokens: Tensor, parents: Tensor) -> int:
        """Add a frontier, see `tree.Expand` -> its depth, 1 for the root's children."""
        self.frontiers.extend(parents)
        self.tokens = torch.cat([self.tokens, tokens], 1)
        self.ancestors.append(self.frontiers.ancestors)
        self.level += 1
        return self.level

    def over(self, place: int) -> Pass:
        """The pass of module `place` over all of them."""
        count = self.tokens.shape[1]
        seen = torch.cat([pad(rows, (0, count - rows.shape[2])) for rows in self.ancestors], 1)
        lengths = (self.lengths - place).clamp(min=0)
        return Pass(lengths, self.depths, pack_bits(seen), self.depths, wanted=self.wanted)


def spread(index: Tensor, values: Tensor) -> Tensor:
    """index [B, T] -> [B, T, H], to gather from values [B, .., H]."""
    return index[:, :, None].expand(-1, -1, values.shape[2])

"""What neural drafters share: what a step wants of them, the passes over one frontier after the other, candidates that
are none, and ids that they can embed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.bits import pack_bits
from ..attention import Pass
from ..state import State
from ..tree import Candidates


class FrontierPasses:
    """Each level processes its new nodes alone: they see the committed tokens, their own ancestors among the nodes
    drafted before, and themselves. Their keys go to the slots after the committed ones, level by level.
    """

    def __init__(self, lengths: Tensor, wanted: Tensor | None = None, state: Mapping[str, Tensor] | None = None):
        """lengths [B]: tokens committed to the drafter's cache, the root's included; wanted, state: see `Pass`."""
        self.lengths, self.wanted, self.state = lengths, wanted, state
        self.ancestors = torch.zeros(lengths.shape[0], 1, 0, dtype=torch.bool, device=lengths.device)  # [B, F, M]
        self.depths = self.parents = lengths[:, None][:, :0]  # [B, M] of all nodes drafted so far
        self.level, self.frontier = 0, -1  # the frontier that is extended: where it begins, -1 for the root alone
        self.earlier: dict[str, Tensor] = {}

    def extend(self, parents: Tensor) -> Pass:
        """parents [B, F], indices in the previous frontier (the root alone at first) -> the pass over the new
        frontier."""
        batch, width = parents.shape
        drafted = self.depths.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
        inherited = self.ancestors.gather(1, parents[:, :, None].expand(-1, -1, drafted))
        self.ancestors = torch.cat([inherited, own], 2)
        depths = torch.full_like(parents, self.level)
        self.depths = torch.cat([self.depths, depths], 1)
        self.parents = torch.cat([self.parents, parents + self.frontier], 1)
        self.level, self.frontier = self.level + 1, drafted
        return Pass(
            self.lengths,
            depths,
            pack_bits(self.ancestors),
            self.depths,
            drafted,
            self.wanted,
            parents=self.parents,
            state=self.state,
            earlier=self.earlier,
        )


def drafting(state: State) -> Tensor:
    """[1] bool: whether a scorer that pauses takes part in this step."""
    return state["catch_up"][:1] >= 0


def no_candidates(tokens: Tensor, top_k: int) -> Candidates:
    """For a frontier [B, F] of which a scorer has nothing to say: K candidates that are none."""
    nothing = tokens[:, :, None].expand(-1, -1, top_k)
    return Candidates(nothing, torch.full_like(nothing, float("-inf"), dtype=torch.float32))


def embeddable(tokens: Tensor, count: int) -> Tensor:
    """Token ids for a table of `count` embeddings; ids past it take its last row. A target may know more ids than a
    drafter of its family, whose vocabularies are padded to other sizes: what they stand for, a drafter cannot know."""
    return tokens.clamp(max=count - 1)

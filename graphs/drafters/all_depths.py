"""What drafters share that say all depths in one pass: mask tokens behind the root stand for what is not known yet.

Letters: B batch, F frontier nodes, C positions to catch up, D greatest depth, K candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..tree import Candidates, Expand, TreeShape
from .frontier import no_candidates


def masks_behind(shape: TreeShape) -> int:
    """How many masks follow the root: it says the first depth itself."""
    return max(shape.depth - 1, 0)


def with_masks(given: Tensor, last: Tensor, mask: Tensor | int, masks: int) -> Tensor:
    """What a pass is given for each of C positions [B, C, ..], of which `last` [B, 1] is the root's -> that up to the
    root, `mask` behind it, [B, C + masks, ..]."""
    longer = pad(given, (*(0, 0) * (given.dim() - 2), 0, masks))
    known = torch.arange(longer.shape[1], device=given.device) <= last
    return longer.where(known.view(*known.shape, *[1] * (given.dim() - 2)), mask)


def of_depths(outputs: Tensor, last: Tensor, masks: int) -> Tensor:
    """Outputs [B, C + masks, H] of a pass -> those of the root and the masks, which say the depths, [B, D, H]."""
    places = last + torch.arange(1 + masks, device=last.device)
    return outputs.gather(1, places[:, :, None].expand(-1, -1, outputs.shape[2]))


def begun(levels: Sequence[Candidates], known: Tensor, top_k: int) -> tuple[Candidates, Expand]:
    """The candidates [B, 1, K] of each depth -> the root's children, none for rows that are not `known` [B], and a
    function that scores the further frontiers: all nodes of one have the same candidates, whatever their paths. Deeper
    levels get none."""
    first, left = levels[0], iter(levels[1:])

    def expand(tokens: Tensor, parents: Tensor) -> Candidates:
        found = next(left, None)
        if found is None:
            return no_candidates(tokens, top_k)
        return Candidates(*(part.expand(-1, tokens.shape[1], -1) for part in found))

    return first.where(known), expand

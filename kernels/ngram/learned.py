"""A bounded table of what followed what in an engine's own answers, in plain torch.

An entry of the table says how often a token followed a context, which is the last token or the last two. It packs a tag
of the context, the token and the count in one int64, 0 where there is none: (tag * MOST_TOKENS + token) * COUNTS +
count. A context's entries lie in one row of WAYS, which other contexts may share: the tag tells them apart, but for one
in 2**31. A new entry takes the place of the rarest of its row once it has worn that one's count down, as in the
frequent-items summary of Misra and Gries (1982); a count that reaches its greatest halves its row. The row after the
last is always empty: updates that are none go there.

What a target says after the nodes of a tree that it does not accept is counted, too, as Token Recycling does (arXiv
2408.08696): it would say so, should the text come there.

Letters: R rows, W WAYS, B batch, M tokens, F frontier nodes.
"""

import torch
from torch import Tensor

from ...controls import LEARNED_COUNTS as COUNTS
from ...controls import LEARNED_TOKENS as MOST_TOKENS
from .tables import mix

WAYS = 16
ALONE = MOST_TOKENS  # stands for the token before the last in a context of one
CONTEXTS = 2  # of each place: one token, two tokens


def contexts(previous: Tensor, last: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """previous, last: int64 [B, M], previous negative where there is none -> the row and the tag of the contexts `last`
    and `previous last`, both [B, M, CONTEXTS]; where there is none, the row is `rows`."""
    before = torch.stack([torch.full_like(last, ALONE), previous.clamp(min=0)], 2)
    after = last[:, :, None].expand_as(before)
    there = torch.stack([last >= 0, previous >= 0], 2)
    return (mix(before, after) % rows).where(there, rows), 1 + mix(after, before)  # an empty entry has no tag


def learn(table: Tensor, previous: Tensor, last: Tensor, token: Tensor, new: Tensor) -> None:
    """Count tokens by what was ahead of them, in place. Of those that would write the same row of the table the first
    alone is counted.

    Args:
        table: int64 [R + 1, W], written.
        previous, last, token: int64 [B, M], tokens and the two ahead of each, negative where there is none.
        new: bool [B, M], which of them count.
    """
    rows, tags = contexts(previous, last, table.shape[0] - 1)
    row = rows.where(new[:, :, None], table.shape[0] - 1).flatten()  # [B * M * CONTEXTS]
    index = torch.arange(row.shape[0], device=row.device)
    again = ((row[:, None] == row) & (index < index[:, None])).any(1)
    row = row.where(~again, table.shape[0] - 1)
    key = (tags * MOST_TOKENS + token[:, :, None]).flatten()
    held = table[row]
    table.index_put_((row,), counted(held, key).where((row < table.shape[0] - 1)[:, None], held))


def learn_text(table: Tensor, history: Tensor, lengths: Tensor, moved: Tensor, most: int) -> None:
    """Count the newest tokens of texts, in place: history int64 [B, S], of which moved [B] tokens up to the one at
    lengths [B] are new, at most `most`."""
    back = torch.arange(most, device=history.device)
    place = lengths[:, None] - back  # [B, M], the newest first
    token, last, previous = (history.gather(1, (place - n).clamp(min=0)).where(place >= n, -1) for n in (0, 1, 2))
    learn(table, previous, last, token, back < moved[:, None])


def counted(held: Tensor, key: Tensor) -> Tensor:
    """Rows [U, W], and the context and token [U] that each sees once more -> what the rows become."""
    count, way = held % COUNTS, torch.arange(WAYS, device=held.device)
    same = held // COUNTS == key[:, None]
    rank = count * WAYS + way
    rarest = rank == rank.amin(1, keepdim=True)
    one = (key * COUNTS + 1)[:, None]
    worn = torch.where(count > 1, held - 1, one)
    after = torch.where(same.any(1, keepdim=True), held + same, torch.where(rarest, worn, held))
    full = (after % COUNTS == COUNTS - 1).any(1, keepdim=True)
    return torch.where(full, after - (after % COUNTS + 1) // 2, after)


def remembered(table: Tensor, previous: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """What followed the contexts of each node: previous, last [B, F] -> tokens [B, F, CONTEXTS, W], -1 where there is
    none, and counts [B, F, CONTEXTS, W], both int64."""
    rows, tags = contexts(previous, last, table.shape[0] - 1)
    held = table[rows]
    ours = (held // COUNTS // MOST_TOKENS == tags[..., None]) & (held % COUNTS > 0)
    return (held // COUNTS % MOST_TOKENS).where(ours, -1), (held % COUNTS).where(ours, 0)

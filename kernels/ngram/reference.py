"""An n-gram language model over a row's own history, a prediction of its answer and, with tables, what the engine wrote
before and a corpus: one level of a tree.

Longer matches back off to shorter ones, these to what followed the last two tokens and the last one in the engine's own
answers, and these to the tables of a corpus, as in a hierarchical Dirichlet language model (MacKay and Peto, 1995): n
matches of a length get weight n / (n + c), the backed-off estimate c / (n + c).
A prediction goes on at one place for each node: its token gets a weight, by the length of its match, over all of these.

Letters: B batch, F frontier nodes, S history slots, P slots of the prediction, n longest match, M matches looked at,
E table entries of a row, L learned entries of a row, C = M + 1 + E + 2 * L candidates, K of them returned.
"""

import torch
from torch import Tensor

from ..rank.reference import STEPS_PER_NAT, rank
from .learned import remembered
from .tables import look_up

# c of what followed the last token, and the last two, in the engine's answers. From 2 to 20 and from 2 to 8 the drafts
# of held-out answers are as good within 1%.
LEARNED_CONCENTRATIONS = (20.0, 4.0)


def ngram(
    history: Tensor,
    lengths: Tensor,
    context: Tensor,
    prediction: Tensor,
    predicted: Tensor,
    expected: Tensor,
    concentrations: Tensor,
    trust: Tensor,
    bigrams: Tensor | None,
    keys: Tensor | None,
    trigrams: Tensor | None,
    probability: Tensor | None,
    learned: Tensor | None,
    matches: int,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest next tokens of each node, each once, the first of equals first.

    Args:
        history: int64 [B, S], tokens of each row up to the root at lengths[b]; what lies behind is not looked at.
        lengths: int64 [B].
        context: int64 [B, F, n], the last tokens up to each node; negative where the row has none.
        prediction: int64 [B, P], what the answer may repeat, of which predicted, int64 [B], tokens are there.
        expected: int64 [B, F], 0 or more, the place in it that should come after each node.
        concentrations: float32 [n], c of each match length from 1 on; 0 where that length is left out.
        trust: float32 [n + 1], the weight of the prediction's token after a match of each length from 0 on.
        bigrams, keys, trigrams, probability: see `tables.look_up`, or all None.
        learned: see `learned.py`, or None.
        matches: M, the longest and then the latest are looked at.

    Returns:
        tokens int64 and log-probabilities float32 [B, F, K], multiples of 1 / STEPS_PER_NAT; token 0 and -inf where
        there are fewer. places int64 [B, F]: those of `follow_prediction`.
    """
    length, follow = find_matches(history, lengths, context, matches)
    places, guess, weight = follow_prediction(prediction, predicted, context, expected, trust)
    previous, last, candidates = context[:, :, -2], context[:, :, -1], [follow.where(length > 0, -1), guess]
    entries = known = seen = counts = None
    if bigrams is not None and keys is not None and trigrams is not None and probability is not None:
        entries, known = look_up(previous, last, bigrams, keys, trigrams, probability)
        candidates.append(entries)
    if learned is not None:
        seen, counts = remembered(learned, previous, last)
        candidates.append(seen.flatten(2))
    tokens = torch.cat(candidates, 2)  # [B, F, C]
    share = torch.zeros_like(tokens, dtype=torch.float32)
    if entries is not None and known is not None:
        share = ((tokens[:, :, :, None] == entries[:, :, None]) * known[:, :, None]).sum(-1)
    if seen is not None and counts is not None:
        for its, times, prior in zip(seen.unbind(2), counts.unbind(2), LEARNED_CONCENTRATIONS, strict=True):
            count = ((tokens[:, :, :, None] == its[:, :, None]) * times[:, :, None]).sum(-1)  # [B, F, C]
            share = (count + prior * share) / (times.sum(-1, keepdim=True) + prior)
    same = tokens[:, :, :, None] == follow[:, :, None]  # [B, F, C, M]
    for least, concentration in enumerate(concentrations.unbind(), 1):
        matched = length >= least  # [B, F, M]
        count, total = (same & matched[:, :, None]).sum(-1), matched.sum(-1, keepdim=True)
        estimate = (count + concentration * share) / (total + concentration).clamp(min=1e-9)
        share = torch.where(concentration > 0, estimate, share)
    share = weight * (tokens == guess) + (1 - weight) * share
    greedy = torch.zeros_like(lengths)
    best, score = rank(tokens, share.masked_fill(tokens < 0, 0.0).log(), greedy.float(), greedy, greedy, top_k)
    return best, (score * STEPS_PER_NAT).round() / STEPS_PER_NAT, places


def find_matches(history: Tensor, lengths: Tensor, context: Tensor, matches: int) -> tuple[Tensor, Tensor]:
    """The M longest, then latest, matches of each node's context -> their lengths and the tokens that follow them,
    both [B, F, M] int64."""
    slots = history.shape[1]
    key = _match_keys(history.int(), lengths, context.int())
    best = [key.amax(2, keepdim=True)]
    while len(best) < matches:  # each pass a fused reduction: `topk` over the slots takes longer than all
        best.append(key.where(key < best[-1], -1).amax(2, keepdim=True))
    found = torch.cat(best, 2).long()
    length, place = found // slots, found % slots
    follow = history[:, None].expand(-1, context.shape[1], -1).gather(2, (place + 1).clamp(max=slots - 1))
    return length, follow


def _match_keys(history: Tensor, lengths: Tensor, context: Tensor) -> Tensor:
    """Sort keys of the matches [B, F, S] int32, all different: S times the length of the match that ends at a place,
    plus the place."""
    slots = history.shape[1]
    place = torch.arange(slots, device=history.device, dtype=torch.int32)
    there = (place < lengths[:, None])[:, None]  # a match needs a token after it
    return _match_lengths(history, there, context, 0) * slots + place


def follow_prediction(
    prediction: Tensor, predicted: Tensor, context: Tensor, expected: Tensor, trust: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the prediction goes on after each node: behind the longest match of its context, of equals the nearest to
    the expected place, then the later; at the expected place where nothing matches.

    Returns:
        that place [B, F], the expected one where the prediction has no token for it; the token that is there, or -1,
        and its weight, both [B, F, 1].
    """
    slots = prediction.shape[1]
    place = torch.arange(slots, device=prediction.device, dtype=torch.int32)
    there = (place < predicted[:, None])[:, None]  # [B, 1, P]
    length = _match_lengths(prediction.int(), there, context.int(), 1)
    middle = expected.clamp(max=slots)[:, :, None]
    ahead = place - middle.int()  # [B, F, P]
    far = 2 * ahead.abs() - (ahead > 0).int()  # differs from place to place, at most 2 * P
    key = (length + 1) * (2 * slots + 1) - 1 - far
    best = key.where(there & ((length > 0) | (ahead == 0)), -1).amax(2, keepdim=True).long()
    far = 2 * slots - best % (2 * slots + 1)
    found = middle + (far + 1) // 2 * torch.where(far % 2 == 1, 1, -1)
    row = prediction[:, None].expand(-1, context.shape[1], -1)
    token = row.gather(2, found.clamp(0, slots - 1))
    weight = trust[(best // (2 * slots + 1)).clamp(min=0)]
    return found[:, :, 0].where(best[:, :, 0] >= 0, expected), token.where(best >= 0, -1), weight.where(best >= 0, 0.0)


def _match_lengths(tokens: Tensor, there: Tensor, context: Tensor, first: int) -> Tensor:
    """How many of a node's last tokens stand at each of the places [B, 1, S] that are there, or with `first` 1 ahead of
    it: int32 [B, F, S]."""
    slots, longest = tokens.shape[1], context.shape[2]
    run, length = there, torch.zeros_like(context[:, :, :1])
    for back in range(longest):
        shifted = torch.nn.functional.pad(tokens, (back + first, 0), value=-1)[:, :slots]
        run = run & (shifted[:, None] == context[:, :, longest - 1 - back, None])
        length = length + run
    return length

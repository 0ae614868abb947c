"""What DFlash2 adds to a block drafter: convolutions around the parts of a layer, and a choice among few tokens."""

import torch


def selector_tensors(taps, group, vocabulary, rank, size):
    """What a drafter of two layers has more."""
    name = "candidate_selector."
    made = {f"{name}{part}_codebook": torch.randn(vocabulary, rank) * 0.4 for part in ("predecessor", "successor")}
    made[f"{name}hidden_projection.weight"] = torch.randn(rank, size) * 0.3
    for name in (f"layers.{index}.{part}_conv" for index in range(2) for part in ("attention", "mlp")):
        made[f"{name}.base_kernel"] = torch.randn(2, taps, size) * 0.5
        made[f"{name}.kernel_projection.weight"] = torch.randn(2 * taps * (size // group), size) * 0.1
    return made


def convolved(w, name, x, kernels=None):
    """Slots x [Q, H] as they are convolved ahead of a layer's part, and the kernels for behind it; behind it with
    those. As they are where it has no such tensors."""
    if f"{name}.base_kernel" not in w:
        return x, None
    base = w[f"{name}.base_kernel"]
    taps = base.shape[1]
    if kernels is None:
        both = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)
        return convolved(w, name, x, (both[:, 0], base[0]))[0], (both[:, 1], base[1])
    own, base = kernels
    made = torch.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(taps, slot + 1)):
            weight = base[tap] + own[slot, tap].repeat_interleave(x.shape[1] // own.shape[2])
            made[slot] += weight * x[slot - tap]
    return made, None


def plain_selector(w, logits, hidden, token, among=4):
    """The scores of the likeliest tokens, -inf for others."""
    own = "candidate_selector."
    weighed = w[f"{own}predecessor_codebook"][token] * (w[f"{own}hidden_projection.weight"] @ hidden)
    scores = torch.full_like(logits, -torch.inf)
    for candidate in logits.topk(among).indices.tolist():
        scores[candidate] = logits[candidate] + weighed @ w[f"{own}successor_codebook"][candidate]
    return scores

"""The rank of a node's candidates, in plain Python."""

import math

import torch
from specstep.kernels.noise import gumbel


def noise_of(seed, position, token):
    return gumbel(*(torch.tensor(value) for value in (seed, position, token))).item()


def ranked(given_candidates, temperature, seed, position):
    """{token: score} of a node's candidates."""
    first = {}
    for token, share in given_candidates:
        if share:
            first.setdefault(token, share)
    if not temperature:
        return {token: math.log(share) for token, share in first.items()}
    rest = math.log(max(1 - sum(first.values()), 1e-6)) / temperature
    plain = {token: math.log(share) / temperature for token, share in first.items()}
    noisy = {token: 2 * (score + noise_of(seed, position, token)) for token, score in plain.items()}
    totals = [
        math.log(sum(map(math.exp, (*parts.values(), left)))) for parts, left in ((plain, rest), (noisy, 2 * rest))
    ]
    return {token: (plain[token] - totals[0] + noisy[token] - totals[1]) / 2 for token in first}

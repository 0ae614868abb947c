"""Calls of tree attention on random trees, and what they must give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from specstep.kernels.bits import unpack_bits
from specstep.kernels.tree_layout.reference import tree_layout
from torch import Tensor


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    depths: Tensor
    ancestors: Tensor
    key_depths: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def args(self, device: str) -> list[Any]:
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def brute_force(case: Case) -> Tensor:
    """In float64, query by query."""
    batch, heads, nodes, _ = case.q.shape
    group, slots, keys = heads // case.k.shape[1], case.k.shape[2], case.key_depths.shape[1]
    bits = unpack_bits(case.ancestors, keys)
    out = torch.zeros(batch, nodes, heads, case.v.shape[3], dtype=torch.float64)
    for b, length in enumerate(case.lengths.tolist()):
        for t in range(nodes):
            seen = [(j, j) for j in range(min(length, slots))]
            seen += [
                (length + j, length + int(case.key_depths[b, j]))
                for j in range(keys)
                if bits[b, t, j] and length + j < slots
            ]
            at = length + int(case.depths[b, t])
            chosen = [slot for slot, position in seen if case.window == 0 or at - position < case.window]
            for h in range(heads):
                out[b, t, h] = _attend(case, b, h, t, h // group, chosen)
    return out


def _attend(case: Case, b: int, h: int, t: int, kv: int, chosen: list[int]) -> Tensor:
    scores = case.k[b, kv, chosen].double() @ case.q[b, h, t].double() * case.scale
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    logits = scores if case.sinks is None else torch.cat((scores, case.sinks[h : h + 1].double()))
    if len(logits) == 0:
        return torch.zeros(case.v.shape[3], dtype=torch.float64)
    return logits.softmax(0)[: len(scores)] @ case.v[b, kv, chosen].double()


def make_case(
    random_trees: Callable[[int, int, int], tuple[Tensor, Tensor]],
    nodes: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    lengths: tuple[int, ...] = (0, 70, 33),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    value_dim: int | None = None,
) -> Case:
    torch.manual_seed(seed)
    batch, slots = len(lengths), max(lengths) + nodes + 3
    parents, valid = random_trees(5, nodes, seed)
    rows = [2 + b % 3 for b in range(batch)]  # random, pruned and garbage trees
    ancestors, depths = tree_layout(parents[rows], valid[rows])
    sizes = (head_dim, value_dim or head_dim)
    k, v = (torch.randn(batch, kv_heads, slots + 5, size).to(dtype)[:, :, :slots] for size in sizes)
    q = torch.randn(batch, nodes, heads, head_dim).to(dtype).transpose(1, 2)  # as a projection leaves it
    return Case(q, k, v, torch.tensor(lengths), depths, ancestors, depths, head_dim**-0.5)

"""Tree attention of one layer, ours, SDPA's and FlexAttention's, against reading the keys and values."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from specstep.kernels.bits import unpack_bits
from specstep.kernels.tree_attention.op import tree_attention
from specstep.kernels.tree_attention.reference import visible_slots
from specstep.kernels.tree_layout.op import tree_layout
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from .clock import replayed_s
from .shapes import MODELS

Call = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, H, T, D], k and v [B, H_kv, S, D] -> [B, H, T, D]
BATCHES, NODES, LENGTHS = (1, 4, 16), (5, 17, 33, 65), (512, 4096)
WORKING_SET = {"cuda": 256 << 20, "cpu": 1 << 20}  # bytes; layers of it are read in turn, as a step does
MOST_LAYERS = 32
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def measure_attention(
    model: str, device: str, dtype: torch.dtype, bandwidth: float, batches: Any, nodes: Any, lengths: Any
) -> Iterator[dict[str, Any]]:
    """A dict for each size: microseconds a layer of each contender, and of its floor. Contenders that disagree raise
    RuntimeError."""
    for batch in batches:
        for tokens in lengths:
            for count in nodes:
                yield _measure(model, device, dtype, bandwidth, batch, count, tokens)


def _measure(
    model: str, device: str, dtype: torch.dtype, bandwidth: float, batch: int, nodes: int, tokens: int
) -> dict[str, Any]:
    sizes = MODELS[model]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    size, slots = sizes["hidden_size"] // heads, tokens + nodes
    layer_bytes = 2 * batch * kv_heads * slots * size * dtype.itemsize
    layers = min(max(WORKING_SET[device] // layer_bytes, 1), MOST_LAYERS)
    torch.manual_seed(0)
    make = partial(torch.randn, dtype=dtype, device=device)
    q = make(batch, heads, nodes, size)
    caches = [(make(batch, kv_heads, slots, size), make(batch, kv_heads, slots, size)) for _ in range(layers)]
    found = {"model": model, "batch": batch, "nodes": nodes, "cache": tokens, "layers": layers}
    found["floor_us"] = layer_bytes / bandwidth * 1e6
    calls = contenders(batch, nodes, tokens, size**-0.5, device)
    _agree({name: call(q, *caches[0]) for name, call in calls.items()}, TOLERANCE[dtype])
    for name, call in calls.items():
        seconds = replayed_s(lambda call=call: [call(q, *cache) for cache in caches], device)
        found[f"{name}_us"] = seconds / layers * 1e6
    return found | {"ours_over_floor": found["ours_us"] / found["floor_us"]}


def contenders(batch: int, nodes: int, tokens: int, scale: float, device: str) -> dict[str, Call]:
    """Calls that attend to `tokens` committed tokens and to a random tree of `nodes` behind them."""
    parents = (torch.rand(batch, nodes) * torch.arange(nodes)).long()
    parents[:, 0] = -1
    ancestors, depths = tree_layout(parents.to(device), torch.ones(batch, nodes, dtype=torch.bool, device=device))
    lengths = torch.full((batch,), tokens, device=device)
    where = lengths, depths, ancestors, depths
    tree = unpack_bits(ancestors, nodes)  # [B, T, T]
    mask = visible_slots(*where, tokens + nodes)[:, None]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        node = (key - tokens).clamp(0, nodes - 1)
        return (key < tokens) | tree[b, query, node]

    blocks = create_block_mask(visible, batch, None, nodes, tokens + nodes, device=device)
    flex = torch.compile(flex_attention, fullgraph=True)
    return {
        "ours": lambda q, k, v: tree_attention(q, k, v, *where, scale).transpose(1, 2),
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True),
        "flex": lambda q, k, v: flex(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True),
    }


def _agree(results: dict[str, Tensor], tolerance: float) -> None:
    """Raise RuntimeError where contenders do not compute the same."""
    for name, result in results.items():
        off = (result - results["ours"]).abs().max().item()
        if not off <= tolerance:
            raise RuntimeError(f"{name}: expected what ours says within {tolerance:g}, got {off:g} off")

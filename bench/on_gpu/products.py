"""Products of a layer and of the head, in one piece as engines have them and apart, against reading their weights."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from .attention import MOST_LAYERS, WORKING_SET
from .clock import replayed_s
from .shapes import MODELS

ROWS = (1, 5, 17, 65, 272)  # tokens of a pass: nodes of all rows, the last one 16 rows of 17


def products(model: str) -> dict[str, tuple[list[int], int]]:
    """Of a model of MODELS: name -> columns of the parts that have one input, and its depth."""
    sizes = MODELS[model]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return {
        "q, k, v": ([hidden, kv, kv], hidden),
        "o": ([hidden], hidden),
        "gate, up": ([inner, inner], hidden),
        "down": ([hidden], inner),
        "lm_head": ([sizes["vocab_size"]], hidden),
    }


def measure_products(
    model: str, device: str, dtype: torch.dtype, bandwidth: float, counts: Any = ROWS
) -> Iterator[dict[str, Any]]:
    """A dict for each product and number of rows: microseconds in one piece, in its parts, and of its floor."""
    for name, (columns, depth) in products(model).items():
        used = sum(columns) * depth * dtype.itemsize
        layers = min(max(WORKING_SET[device] // used, 1), MOST_LAYERS)
        weights = [torch.randn(sum(columns), depth, dtype=dtype, device=device) for _ in range(layers)]
        parts = [part for weight in weights for part in weight.split(columns)]
        for rows in counts:
            x = torch.randn(rows, depth, dtype=dtype, device=device)
            whole, apart = (replayed_s(partial(through, x, each), device) / layers * 1e6 for each in (weights, parts))
            floor = used / bandwidth * 1e6
            found = {"model": model, "product": name, "rows": rows, "layers": layers}
            yield found | {"whole_us": whole, "apart_us": apart, "floor_us": floor, "whole_over_floor": whole / floor}


def through(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x [T, depth] times each of the weights [columns, depth]."""
    return [linear(x, weight) for weight in weights]

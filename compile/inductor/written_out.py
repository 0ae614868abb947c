"""Writes ops of CPU graphs out as others, whose results have the same bits in any company, see `exact`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph_edits import insert_call
from .exact import fits

aten = torch.ops.aten
MOST_TERMS = 16  # of a sum that is written as one: those of Gemma 3n's streams, never a layer's


def write_out(exported: ExportedProgram) -> None:
    """Replace products of a few terms, standard deviations and means over other than the last dimension, in place."""
    for node in list(exported.graph.nodes):
        written = _WRITTEN.get(node.target)
        if written is None or not fits(node):
            continue
        with node.graph.inserting_before(node):
            result = written(node)
            if result is not None:
                result = insert_call(node, aten.to.dtype, (result, node.meta["val"].dtype))
        if result is not None:
            node.replace_all_uses_with(result)
            node.graph.erase_node(node)


def _call(node: Node, op: Any, *arguments: Any) -> Node:
    return insert_call(node, op, arguments)


def _wide(node: Node, x: Any) -> Node:
    return _call(node, aten.to.dtype, x, torch.float32)


def _product(node: Node) -> Node | None:
    """a [.., N, K] @ b [.., K, M]: the sum of K products of elements, one after the other."""
    a, b = node.args[:2]
    terms, sizes = a.meta["val"].shape[-1], (a.meta["val"].dim(), b.meta["val"].dim())  # type: ignore[union-attr]
    if not isinstance(terms, int) or terms > MOST_TERMS or sizes[0] != sizes[1] or sizes[0] < 3:
        return None
    total, a, b = None, _wide(node, a), _wide(node, b)
    for term in range(terms):
        column, row = (_call(node, aten.slice.Tensor, x, dim, term, term + 1) for x, dim in ((a, -1), (b, -2)))
        product = _call(node, aten.mul.Tensor, column, row)
        total = product if total is None else _call(node, aten.add.Tensor, total, product)
    return total


def _deviation(node: Node) -> Node | None:
    x, dims, *others = node.args
    if dims not in ([-1], [x.meta["val"].dim() - 1]) or others != [False, True]:  # type: ignore[union-attr]
        return None
    x = _wide(node, x)
    centred = _call(node, aten.sub.Tensor, x, _call(node, aten.mean.dim, x, [-1], True))
    squares = _call(node, aten.mul.Tensor, centred, centred)
    return _call(node, aten.sqrt.default, _call(node, aten.mean.dim, squares, [-1], True))


def _mean(node: Node) -> Node | None:
    x, dims, *keep = node.args
    value = x.meta["val"]  # type: ignore[union-attr]
    if len(dims or ()) != 1 or dims[0] % value.dim() == value.dim() - 1:  # type: ignore[arg-type, index]
        return None
    total = _call(node, aten.sum.dim_IntList, _wide(node, x), dims, *keep)
    return _call(node, aten.div.Tensor, total, value.shape[dims[0]])  # type: ignore[index]


_WRITTEN: dict[Any, Callable[[Node], Node | None]] = {
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.std.dim: _deviation,
    aten.mean.dim: _mean,
}

"""Writes products of complex numbers as those of their parts.

Some models turn queries and keys by complex factors. PyTorch's compiler leaves such products to kernels of its own,
which round in another way at the end of a row than within it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph_edits import CONVERSIONS, insert_call

aten = torch.ops.aten
RealImaginary = dict[Node, Node]  # from complex numbers [...] to their parts [..., 2]


def split_complex(exported: ExportedProgram) -> None:
    """Replace complex tensors by their parts, in place, where all that is done with them is known: products, and what
    makes and moves factors of a rotation."""
    graph, parts = exported.graph_module.graph, RealImaginary()
    calls = [node for node in graph.nodes if node.op == "call_function"]
    concerned = [node for node in calls if _is_complex(node) or any(map(_is_complex, node.all_input_nodes))]
    if not all(_known(node) for node in concerned):
        return
    for node in concerned:
        with graph.inserting_before(node):
            new = _RULES[node.target](node, parts)
        if new is None:
            continue
        if _is_complex(node):
            parts[node] = new
        else:
            node.replace_all_uses_with(new)
            exported.graph_signature.replace_all_uses(node.name, new.name)
    for node in reversed(concerned):
        graph.erase_node(node)


def _known(node: Node) -> bool:
    """Whether a call is one of our rules': a product is of two complex tensors, or of one and a number."""
    if node.target != aten.mul.Tensor:
        return node.target in _RULES
    first, second = node.args
    return _is_complex(first) and (not isinstance(second, Node) or _is_complex(second))  # type: ignore[arg-type]


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _polar(node: Node, parts: RealImaginary) -> Node:
    size, angle = node.args
    functions = [insert_call(node, function, (angle,)) for function in (aten.cos.default, aten.sin.default)]
    both = [insert_call(node, aten.mul.Tensor, (size, function)) for function in functions]
    return insert_call(node, aten.stack.default, (both, -1))


def _product(node: Node, parts: RealImaginary) -> Node:
    first, second = node.args
    if not isinstance(second, Node):
        return insert_call(node, aten.mul.Tensor, (parts[first], second))  # type: ignore[index]
    (a, b), (c, d) = ([_part(node, parts[x], index) for index in (0, 1)] for x in (first, second))  # type: ignore[index]
    products = [insert_call(node, aten.mul.Tensor, pair) for pair in ((a, c), (b, d), (a, d), (b, c))]
    real = insert_call(node, aten.sub.Tensor, products[:2])
    imaginary = insert_call(node, aten.add.Tensor, products[2:])
    return insert_call(node, aten.stack.default, ([real, imaginary], -1))


def _part(place: Node, both: Node, index: int) -> Node:
    return insert_call(place, aten.select.int, (both, -1, index))


def _unsqueeze(node: Node, parts: RealImaginary) -> Node:
    x, dim = node.args
    return insert_call(node, aten.unsqueeze.default, (parts[x], dim if dim >= 0 else dim - 1))  # type: ignore[index, operator]


def _same(node: Node, parts: RealImaginary) -> Node:
    return parts[node.args[0]]  # type: ignore[index]


_RULES: dict[Any, Callable[[Node, RealImaginary], Node | None]] = {
    aten.polar.default: _polar,
    aten.view_as_complex.default: lambda node, parts: node.args[0],  # type: ignore[dict-item, return-value]
    aten.view_as_real.default: _same,
    aten.mul.Tensor: _product,
    aten.unsqueeze.default: _unsqueeze,
    aten._assert_tensor_metadata.default: lambda node, parts: None,
    **dict.fromkeys((*CONVERSIONS, aten.to.device, aten.alias.default), _same),  # on one device, and of one dtype
}

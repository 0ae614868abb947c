"""Finds RMS norms in an exported graph and makes each one op.

A model writes the square, its mean, the root and two products, some of them rounded. Compiled as they are, a norm is
two loops around a reduction. What does not match stays as it is.
"""

from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..graph_edits import ASSERTION, CONVERSIONS, drop_assertions, insert_call

aten = torch.ops.aten


def fuse_norms(exported: ExportedProgram) -> None:
    """Replace x * rsqrt(mean(x ** 2) + epsilon), and the weight that it is multiplied by, by `exact_rms_norm`, in
    place: x of float32 or bfloat16 on the CPU, squared in float32."""
    for root in exported.graph_module.graph.find_nodes(op="call_function", target=aten.rsqrt.default):
        _fuse(exported, root)


def use_roots(exported: ExportedProgram) -> None:
    """Have x ** -0.5 be 1 / sqrt(x), in place: the form of a norm that the next rewrite knows, and one that gives an
    element one result, which a power does not."""
    for power in exported.graph_module.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if power.args[1] == -0.5:
            power.target, power.args = aten.rsqrt.default, power.args[:1]


class _Square(NamedTuple):
    """What a root is taken of. nodes: from the root upwards to `wide`, which is x in float32, or x itself."""

    x: Node
    wide: Node
    epsilon: float
    nodes: list[Node]


def _fuse(exported: ExportedProgram, root: Node) -> None:
    square, product = _square(root), _only_user(root, aten.mul.Tensor)
    if square is None or product is None or square.wide not in product.args:
        return
    dtype = square.x.meta["val"].dtype
    weight, behind = _weighted(product, dtype)
    last = [product, *behind][-1]
    if last.meta["val"].dtype != dtype:
        return
    wide = behind and behind[0].target == aten.mul.Tensor  # the product with the weight is not rounded before
    with root.graph.inserting_before(last):
        if weight is not None and wide and weight.meta["val"].dtype != torch.float32:
            weight = insert_call(last, aten.to.dtype, (weight, torch.float32))
        new = insert_call(last, torch.ops.specstep.exact_rms_norm.default, (square.x, weight, square.epsilon))
    last.replace_all_uses_with(new)
    exported.graph_signature.replace_all_uses(last.name, new.name)
    for node in (*behind[::-1], product, root, *square.nodes):
        _erase_unused(node)


def _square(root: Node) -> _Square | None:
    """What a root is taken of, None where it is no mean of squares."""
    sum_ = _call(root.args[0], aten.add.Tensor)
    mean = _call(sum_.args[0], aten.mean.dim) if sum_ and isinstance(sum_.args[1], float) else None
    power = _call(mean.args[0], aten.pow.Tensor_Scalar) if mean and list(mean.args[1:]) == [[-1], True] else None
    if sum_ is None or mean is None or power is None or power.args[1] != 2:
        return None
    wide: Any = power.args[0]
    x = wide.args[0] if wide.target in CONVERSIONS else wide
    value, epsilon = x.meta["val"], sum_.args[1]
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.bfloat16):
        return None
    if wide.meta["val"].dtype != torch.float32:
        return None
    nodes = [sum_, mean, power] + [wide] * (wide is not x)
    return _Square(x, wide, epsilon, nodes)  # type: ignore[arg-type]


def _weighted(product: Node, dtype: torch.dtype) -> tuple[Node | None, list[Node]]:
    """The weight, None without one, and the nodes behind the product that belong to the norm: either it is rounded,
    then multiplied by a weight of x's dtype, or multiplied in float32, then rounded."""
    nodes: list[Node] = []
    weight, last = None, product
    for _ in range(2):
        user = _only_user(last)
        if user is None:
            break
        if user.target in CONVERSIONS and user.meta["val"].dtype == dtype and last.meta["val"].dtype == torch.float32:
            last = user
        elif user.target == aten.mul.Tensor and weight is None and (found := _row(user, last)) is not None:
            weight, last = found, user
        else:
            break
        nodes.append(last)
    return weight, nodes


def _row(user: Node, factor: Node) -> Node | None:
    """The other factor of a product that has the first one's dtype, where it is one row."""
    first, second = user.args
    other = second if first is factor else first
    if not isinstance(other, Node) or other is factor:
        return None
    alike = user.meta["val"].dtype == factor.meta["val"].dtype
    return other if alike and other.meta["val"].shape == factor.meta["val"].shape[-1:] else None


def _call(node: Any, target: Any) -> Node | None:
    return node if isinstance(node, Node) and node.target == target else None


def _only_user(node: Node, target: Any = None) -> Node | None:
    users = [user for user in node.users if user.target != ASSERTION]
    return users[0] if len(users) == 1 and target in (None, users[0].target) else None


def _erase_unused(node: Node) -> None:
    """Erase a node that only assertions use, and those."""
    if drop_assertions(node):
        node.graph.erase_node(node)

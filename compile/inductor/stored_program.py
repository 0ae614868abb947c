"""Exported programs and the tensors that they store, some of which are packed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from ...kernels.expert_linear.op import expert_linear
from ..graph_edits import CONVERSIONS, add_buffer, drop_assertions
from ..precision import Precision, WeightForm, fp8_scales, plain
from ..writer import identity

STORED = (InputKind.PARAMETER, InputKind.BUFFER)
WeightKey = tuple[Any, ...]  # of a tensor, or of several that are packed together
ASKED, KEPT, COPIED, FP8_SCALED = "as asked", "dtype kept", "copied", "fp8 scales"


def copied(tensor: Tensor) -> WeightForm:
    """Keep a tensor as it is."""
    return WeightForm(str(tensor.dtype).removeprefix("torch."), torch.clone)


# What a weight becomes, by rule, where a build asks for a precision.
RULES: dict[str, Callable[[Precision], Precision]] = {
    ASKED: lambda precision: precision,
    KEPT: lambda precision: plain,
    COPIED: lambda precision: copied,
    FP8_SCALED: lambda precision: fp8_scales,
}


class Recipe(NamedTuple):
    """How a packed weight is made: of stored tensors, converted, turned, and joined along their first dimension."""

    names: tuple[str, ...]
    dtype: str
    rule: str  # of RULES
    turned: bool  # the last two dimensions change places, which gives [..., N, K]


class Packed(NamedTuple):
    """A packed weight, one of several layers perhaps. kind: what its elements are, as `WeightForm` names it."""

    name: str
    kind: str
    tensor: Tensor
    recipe: Recipe


class PackedTensors:
    """Packed tensors, each made once for all programs."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.forms: dict[WeightKey, WeightForm] = {}
        self.made: dict[WeightKey, Packed] = {}

    def form(self, held: Tensor, recipe: Recipe) -> WeightForm:
        """What a stored tensor becomes, by itself or as the first of several."""
        key = (*identity(held), *recipe[1:])
        if key not in self.forms:
            self.forms[key] = RULES[recipe.rule](self.precision)(_converted(held, recipe))
        return self.forms[key]

    def of(self, recipe: Recipe, held: Sequence[Tensor]) -> Packed:
        """What a recipe makes of stored tensors, under a name made from that of the first."""
        form = self.form(held[0], recipe)
        key = (form.kind, *recipe[1:], *map(identity, held))
        if key not in self.made:
            name, taken = f"{recipe.names[0]}_packed", {other.name for other in self.made.values()}
            while name in taken:  # by another tensor, of another program
                name += "_"
            tensors = [_converted(tensor, recipe) for tensor in held]
            joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            self.made[key] = Packed(name, form.kind, form.make(joined), recipe)
        return self.made[key]


def _converted(held: Tensor, recipe: Recipe) -> Tensor:
    tensor = held.to(getattr(torch, recipe.dtype))
    return tensor.transpose(-1, -2) if recipe.turned else tensor


class StoredProgram:
    """An exported program with its stored tensors."""

    def __init__(self, exported: ExportedProgram, packed: PackedTensors, device: str, dtypes: Collection[torch.dtype]):
        """device, dtypes: layers of others are left alone."""
        self.packed_tensors, self.device, self.dtypes = packed, device, dtypes
        self.exported, self.graph = exported, exported.graph_module.graph
        specs = [spec for spec in exported.graph_signature.input_specs if spec.kind in STORED]
        names = {spec.arg.name: spec.target for spec in specs}
        self.stored = {node: names[node.name] for node in self.graph.find_nodes(op="placeholder") if node.name in names}
        for node in self.graph.nodes:  # routers widen their weights in each step, where it does nothing, too
            if node.target in CONVERSIONS and node.args[0] in self.stored:
                self.stored[node] = self.stored[node.args[0]]
        self.replaced: set[Node] = set()  # plain weights
        self.added: dict[str, Node] = {}
        experts = self.graph.find_nodes(op="call_function", target=expert_linear._opoverload)
        self.routed = {node.args[1].meta["val"].shape[0] for node in experts}  # counts of experts

    def calls(self, target: Any, first: int = 0) -> Iterator[Node]:
        """Calls of an op whose arguments from `first` on are an x and a stored tensor of its dtype, which the graph may
        have converted."""
        for node in self.graph.find_nodes(op="call_function", target=target):
            pair = node.args[first : first + 2]
            x, weight = (argument.meta["val"] for argument in pair)
            if pair[1] in self.stored and x.dtype == weight.dtype in self.dtypes and self._here(x, weight):
                yield node

    def embeddings(self) -> Iterator[Node]:
        """Calls of `aten.embedding` over a stored tensor, by ids of int64."""
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            weight, ids = (argument.meta["val"] for argument in node.args[:2])
            if node.args[0] in self.stored and ids.dtype == torch.int64 and self._here(weight, ids):
                yield node

    def _here(self, *tensors: Tensor) -> bool:
        return all(tensor.device.type == self.device for tensor in tensors)

    def _placeholder(self, node: Any) -> Node:
        return node if node.op == "placeholder" else self._placeholder(node.args[0])

    def _held(self, node: Any) -> Tensor:
        return self.exported.state_dict[self.stored[node]].detach()

    def key(self, node: Any) -> WeightKey:
        return (*identity(self._held(node)), node.meta["val"].dtype)

    def recipe(self, nodes: Sequence[Any], rule: str | None = None, turned: bool = False) -> Recipe:
        """How these stored tensors are packed as one. rule: None where it is the precision that is asked for, but for a
        weight that the graph converts, which keeps what that gives, and for a router."""
        held, dtype = self._held(nodes[0]), nodes[0].meta["val"].dtype
        kept = held.dtype != dtype or (held.dim() == 2 and held.shape[-1 if turned else 0] in self.routed)
        names = tuple({self.key(node): self.stored[node] for node in nodes}.values())
        return Recipe(names, str(dtype).removeprefix("torch."), rule or (KEPT if kept else ASKED), turned)

    def kind(self, node: Any) -> str:
        """What the elements of a stored weight become."""
        return self.packed_tensors.form(self._held(node), self.recipe([node])).kind

    def packed(self, nodes: Sequence[Any], rule: str | None = None, turned: bool = False) -> Node:
        """The placeholder of these stored tensors, packed as one, see `recipe`. They are used no more."""
        self.replaced |= {self._placeholder(node) for node in nodes}
        recipe = self.recipe(nodes, rule, turned)
        made = self.packed_tensors.of(recipe, [self.exported.state_dict[name].detach() for name in recipe.names])
        if made.name not in self.added:
            # A described GPU's program holds weights that lie on the CPU.
            new = add_buffer(self.exported, made.name, made.tensor, persistent=True, device=self.device)
            self.added[made.name] = new
        return self.added[made.name]

    def replace(self, node: Node, new: Node) -> None:
        """Have all that uses a node use another, and erase it."""
        node.replace_all_uses_with(new)
        self.exported.graph_signature.replace_all_uses(node.name, new.name)
        self.graph.erase_node(node)

    def drop_unused(self) -> None:
        """Erase plain weights that have no other use."""
        specs, held = self.exported.graph_signature.input_specs, self.exported.state_dict
        for node in reversed(self.stored):  # what a conversion is of comes ahead of it
            if drop_assertions(node) and node.op != "placeholder":
                self.graph.erase_node(node)
        unused = {node for node in self.replaced if not node.users}
        keys, names = {identity(self._held(node)) for node in unused}, {node.name for node in unused}
        specs[:] = [spec for spec in specs if spec.arg.name not in names]
        for node in unused:
            self.graph.erase_node(node)
        targets = {spec.target for spec in specs}
        for name in [name for name, tensor in held.items() if name not in targets and identity(tensor) in keys]:
            del held[name]

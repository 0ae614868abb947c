"""Exported programs and the tensors that they store, some of which are packed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from ...kernels.expert_linear.op import expert_linear
from ..graph_edits import CONVERSIONS, drop_assertions
from ..precision import Precision, WeightForm, plain
from ..writer import identity

STORED = (InputKind.PARAMETER, InputKind.BUFFER)
Turn = Callable[[Tensor], Tensor]  # from a stored tensor to a weight [..., N, K]
WeightKey = tuple[Any, ...]  # of a tensor, or of several that are packed together


def as_is(weight: Tensor) -> Tensor:
    return weight


def turned(weight: Tensor) -> Tensor:
    return weight.transpose(-1, -2)


class Packed(NamedTuple):
    """A packed weight, one of several layers perhaps. kind: what its elements are, as `WeightForm` names it."""

    name: str
    kind: str
    tensor: Tensor


class PackedTensors:
    """Packed tensors, each made once for all programs."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.forms: dict[WeightKey, WeightForm] = {}
        self.made: dict[WeightKey, Packed] = {}

    def form(self, weight: Tensor) -> WeightForm:
        """What a weight [..., N, K] becomes."""
        key = identity(weight)
        if key not in self.forms:
            self.forms[key] = self.precision(weight)
        return self.forms[key]

    def of(self, name: str, weights: Mapping[WeightKey, Callable[[], Tensor]], form: WeightForm) -> Packed:
        """These tensors, joined along their first dimension and brought to a form, under a name made from `name`."""
        key = (form.kind, *weights)
        if key not in self.made:
            name, taken = f"{name}_packed", {other.name for other in self.made.values()}
            while name in taken:  # by another tensor, of another program
                name += "_"
            tensors = [read() for read in weights.values()]
            made = form.make(torch.cat(tensors) if len(tensors) > 1 else tensors[0])
            self.made[key] = Packed(name, form.kind, made)
        return self.made[key]


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

    def tensor(self, node: Any) -> Tensor:
        """The stored tensor behind a placeholder, or what a conversion of it gives: a new tensor each time, where it
        does more than nothing."""
        return self._held(node).to(node.meta["val"].dtype)

    def _placeholder(self, node: Any) -> Node:
        return node if node.op == "placeholder" else self._placeholder(node.args[0])

    def _held(self, node: Any) -> Tensor:
        return self.exported.state_dict[self.stored[node]].detach()

    def key(self, node: Any) -> WeightKey:
        return (*identity(self._held(node)), node.meta["val"].dtype)

    def form(self, node: Any, turn: Turn = as_is) -> WeightForm:
        """What a stored weight becomes once it is turned. One that the graph converts keeps what that gives: the model
        asks for its precision."""
        held, dtype = turn(self._held(node)), node.meta["val"].dtype
        kept = held.dtype != dtype or (held.dim() == 2 and len(held) in self.routed)
        form = plain(held.to(dtype)) if kept else self.packed_tensors.form(held)
        return WeightForm(form.kind, lambda weight: form.make(turn(weight)))

    def packed(self, nodes: Sequence[Any], form: WeightForm) -> Node:
        """The placeholder of these stored tensors in a form, joined. They are used no more."""
        self.replaced |= {self._placeholder(node) for node in nodes}
        tensors = {self.key(node): partial(self.tensor, node) for node in nodes}
        made = self.packed_tensors.of(self.stored[nodes[0]], tensors, form)
        if made.name not in self.added:
            self.added[made.name] = self._add(made.name, made.tensor)
        return self.added[made.name]

    def _add(self, name: str, tensor: Tensor) -> Node:
        specs = self.exported.graph_signature.input_specs
        place = next(index for index, spec in enumerate(specs) if spec.kind not in STORED)
        nodes = self.graph.find_nodes(op="placeholder")
        mode = detect_fake_mode([node.meta.get("val") for node in nodes])
        assert mode is not None
        with self.graph.inserting_before(nodes[place]):
            new = self.graph.placeholder(name.replace(".", "_"))
        # A described GPU's program holds weights that lie on the CPU.
        new.meta["val"] = mode.from_tensor(tensor, static_shapes=True).to(self.device)
        specs.insert(place, InputSpec(InputKind.BUFFER, TensorArgument(name=new.name), name, persistent=True))
        self.exported.state_dict[name] = tensor
        return new

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
        self.exported.graph_module.recompile()

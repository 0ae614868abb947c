"""Modules and exported programs whose tensors lie on a described GPU and have no memory; their weights stay where they
are, beside them."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ....errors import BuildError
from ....runtime.engine_file import EngineSpec
from ...assemble import FlatProgram
from ...export import export_program, has_foreign_scorer

Module = TypeVar("Module", bound=nn.Module)


def export_without_memory(program: FlatProgram, spec: EngineSpec) -> ExportedProgram:
    """The program as it is traced on the described GPU; what it holds are the module's own weights. Raises
    BuildError."""
    if has_foreign_scorer(program):
        export_program(program, dataclasses.replace(spec, device="cpu"))  # its checks need numbers
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        exported = export_program(_without_memory(program), spec)
    own: dict[str, Tensor] = dict(program.named_parameters(remove_duplicate=False))
    own |= dict(program.named_buffers(remove_duplicate=False))
    for held in (exported.state_dict, exported.constants):
        if missing := sorted(held.keys() - own.keys()):
            raise BuildError(
                f"model: expected parameters and buffers alone, got a tensor that is made while it is traced "
                f"({missing[0]}); build where the GPU is, without compute_capability"
            )
        for name in held:
            held[name] = own[name]
    return exported


def _without_memory(module: Module) -> Module:
    """A copy of a module whose tensors lie on the described GPU; what was one tensor still is."""
    there: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
        there[id(tensor)] = nn.Parameter(moved, False) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(module, there)


@contextlib.contextmanager
def weights_away(exported: ExportedProgram) -> Iterator[None]:
    """In the block, an exported program holds the values of its placeholders, which have no memory, as its weights and
    as its inputs: the compiler wants all of one kind."""
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    kept, inputs = (dict(exported.state_dict), dict(exported.constants)), exported._example_inputs
    for spec in exported.graph_signature.input_specs:
        for held in (exported.state_dict, exported.constants):
            if spec.target in held:
                value = values[spec.arg.name]
                held[spec.target] = nn.Parameter(value, False) if spec.kind == InputKind.PARAMETER else value
    exported._example_inputs = (tuple(values[name] for name in exported.graph_signature.user_inputs), {})
    try:
        yield
    finally:
        for held, own in zip((exported.state_dict, exported.constants), kept, strict=True):
            held.update(own)
        exported._example_inputs = inputs

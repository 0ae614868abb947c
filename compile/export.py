"""Trace a flat program into one exported graph and check what every backend relies on."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import BuildError
from ..graphs.drafters.drafter import Drafter
from ..report import RUNNING
from ..runtime.engine_file import EngineSpec
from .assemble import FlatProgram, example_inputs
from .drafters.blame import describe_error, line_of, model_line, reason_of
from .drafters.validate import foreign_scorers
from .fold_numbers import fold_numbers
from .graph_edits import base_of, drop_dead_code, written_arguments
from .lazy_code import code_written_when_run
from .sizes_named_once import sizes_named_once
from .traced_once.once import layers_traced_once

Export = Callable[[FlatProgram, EngineSpec], ExportedProgram]
Compile = Callable[[ExportedProgram, Path, dict[str, Any]], None]  # a program to a package, with Inductor's settings
ASSERTION = torch.ops.aten._assert_async
MODEL_LINE = re.compile(r'File "[^"]*transformers/models/[^"]*/(\w+\.py)", line (\d+)')
EXPECTED = "expected code that torch.export can trace, for any number of rows and cache slots"


def export_program(program: FlatProgram, spec: EngineSpec) -> ExportedProgram:
    """One graph, no break. Dynamic: the number of cache slots (multiples of `slot_step`), in a step the rows, the nodes
    and the positions to catch up, and in a prefill, which has one row, the tokens. Raises BuildError with the line of a
    third party's scorer that cannot be traced."""
    steps = Dim("steps", min=1, max=spec.capacity // spec.slot_step - 1)
    slots = spec.slot_step * steps
    # A bound of 2 would be taken for a flag, and the rows of each tensor for a size of their own.
    step, most_rows = "tokens" not in program.inputs, max(spec.max_batch, 3)
    rows = {0: Dim("rows", min=1, max=most_rows)} if step and spec.max_batch > 1 else {}
    dynamic: dict[str, Any] = dict.fromkeys(program.state, rows) | {name: rows | {2: slots} for name in program.caches}
    if spec.prefill_chunk > 2:
        dynamic["tokens"] = {1: Dim("tokens", min=2, max=spec.prefill_chunk)}
    if spec.nodes:
        dynamic["nodes"] = {0: Dim("nodes", min=1, max=max(1 + spec.nodes, 3))}
    dynamic["catch_up"] = {0: Dim("catch_up", min=1, max=spec.catch_up)} if spec.catch_up else {}
    inputs = example_inputs(spec, program, slots=min(2, spec.capacity // spec.slot_step - 1) * spec.slot_step)
    shapes = (tuple(dynamic.get(name, {}) for name in program.inputs),)
    try:
        exported = _trace(program, inputs, shapes)
    except Exception as error:  # tracing raises anything
        if line_of(error) or has_foreign_scorer(program):
            raise BuildError(f"drafter: {describe_error(error)}; {EXPECTED}") from error
        if line := model_line(error):
            raise BuildError(f"model: {line}: {reason_of(error)}; {EXPECTED}") from error
        raise
    check_graph(exported, program)
    fold_numbers(exported)
    drop_dead_code(exported)
    most = {spec.capacity // spec.slot_step - 1, most_rows, max(1 + spec.nodes, 3), spec.prefill_chunk}
    most |= {spec.catch_up}
    for size, bounds in exported.range_constraints.items():  # a Python `if` on a size narrows it without a word
        if str(size).startswith("s") and int(bounds.upper) not in most:
            if has_foreign_scorer(program):
                raise BuildError(f"drafter: an `if` or `assert` on a size holds for some sizes alone; {EXPECTED}")
            raise AssertionError(f"{size}: expected one of {sorted(most)} as its bound, got {bounds.upper}")
    if has_foreign_scorer(program) and not is_fake(inputs[0]):
        _check_least(exported, program, spec, inputs)
    return exported


def _trace(program: FlatProgram, inputs: list[Tensor], shapes: Any) -> ExportedProgram:
    """The program's graph. Layers that are alike are traced once; where that fails, each of them is."""
    # To find the shapes of a result again takes longer than to compute them where sizes are symbols.
    anew = torch._dynamo.config.patch(fake_tensor_cache_enabled=False)
    lesser = patch.object(torch._prims, "min", _lesser, create=True)
    with torch.no_grad(), anew, lesser, sizes_named_once(shapes[0]):
        with contextlib.suppress(Exception), layers_traced_once(program) as once, code_written_when_run():
            exported = torch.export.export(program, tuple(inputs), dynamic_shapes=shapes, strict=False)
            once.check_sizes()
            return exported
        return torch.export.export(program, tuple(inputs), dynamic_shapes=shapes, strict=False)


def _lesser(stride: Any, other: Any) -> Any:
    """The lesser of two sizes, the first where that is known. Of a flattened tensor PyTorch takes the least stride: of
    H and n * H for n nodes a size that it no longer knows for H, so that a view of another shape would hold for some n
    alone."""
    return stride if statically_known_true(stride <= other) else min(stride, other)


def _check_least(exported: ExportedProgram, program: FlatProgram, spec: EngineSpec, inputs: list[Tensor]) -> None:
    """Compare the integers of the graph and of the program at one row and the fewest slots: an `if` that tells a size
    of one from others leaves no trace in the graph. Raises BuildError."""
    least = f"1 row of {spec.slot_step} slots"
    try:
        with torch.no_grad():
            expected = program(*_least(program, spec, inputs))
    except Exception as error:  # a scorer raises anything
        raise BuildError(f"drafter: {least}: {describe_error(error)}; {EXPECTED}") from error
    try:
        with torch.no_grad():
            got = exported.module()(*_least(program, spec, inputs))
    except Exception as error:  # guards raise anything
        raise BuildError(f"drafter: an `if` or `assert` on a size does not hold for {least}; {EXPECTED}") from error
    for name, ours, theirs in zip(program.outputs, expected, got, strict=False):  # caches may follow
        if not ours.is_floating_point() and not torch.equal(ours, theirs):
            raise BuildError(f"drafter: an `if` on a size gives another {name} for {least}; {EXPECTED}")


def _least(program: FlatProgram, spec: EngineSpec, inputs: list[Tensor]) -> list[Tensor]:
    """Copies of the inputs for a running row, of the least sizes."""
    named = dict(zip(program.inputs, inputs, strict=True))
    given = {name: tensor if name in program.shared else tensor[:1] for name, tensor in named.items()}
    given |= {name: given[name][:, :, : spec.slot_step] for name in program.caches}
    given = {name: tensor.clone() for name, tensor in given.items()}
    filled = {"finish": RUNNING, "limits": spec.max_seq_len, "count": 1}
    for name in filled.keys() & given.keys():
        given[name].fill_(filled[name])
    return list(given.values())


def has_foreign_scorer(program: FlatProgram) -> bool:
    """Whether the program drafts with a third party's scorer."""
    drafter = getattr(program.module, "drafter", None)
    return isinstance(drafter, Drafter) and bool(foreign_scorers(drafter))


def check_graph(exported: ExportedProgram, program: FlatProgram) -> None:
    """Verify the exported graph: no host reads, no data-dependent shapes, no assertions on data, nothing written in
    place but what the program says. Raises BuildError for what a model's own code does, and AssertionError."""
    for node in exported.graph.nodes:
        # The tracer binds a new symbol to a number that is read from a tensor, and to a size that depends on data.
        if node.meta.get("unbacked_bindings") or getattr(node.target, "overloadpacket", None) is ASSERTION:
            if line := MODEL_LINE.findall(node.stack_trace or ""):
                raise BuildError(f"model: {':'.join(line[-1])}: {node.target}, which depends on data; {EXPECTED}")
            raise AssertionError(f"{node.target} in the graph, which depends on data, from:\n{node.stack_trace}")
    names = dict(zip(exported.graph_signature.user_inputs, program.inputs, strict=True))
    odd = {names.get(name, name) for name in written_inputs(exported)} - program.written
    if odd:
        raise AssertionError(f"written in place: expected {sorted(program.written)} at most, got {sorted(odd)}")


def written_inputs(exported: ExportedProgram) -> set[str]:
    """Placeholders, inputs and buffers alike, that a node writes to, directly or through a view. The signature knows
    them only once the graph is functional."""
    written = (base_of(value) for node in exported.graph.nodes for value in written_arguments(node))
    return {base.name for base in written if base.op == "placeholder"}

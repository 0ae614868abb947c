"""Lower a flat program to ONNX: no writes in place, our ops as nodes, the weights in a file that all programs share."""

import json
import logging
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import torch
from onnx_ir.passes import common as passes
from onnxscript import optimizer
from onnxscript.rewriter import RewriteRule, RewriteRuleSet
from onnxscript.rewriter.rules.common import reshape_reshape_rule
from torch import Tensor
from torch.export import ExportedProgram

from ...progress import OnProgress
from ...runtime.engine_file import LAYOUT, NEXT, SIZES, WEIGHTS, ProgramSpec, layout_of
from ..assemble import Assembled, FlatProgram
from ..export import export_program
from ..lowered import Lowered
from ..stages import stage_shares
from ..writer import write_weights
from .copies import copy_committed
from .operators_read_once import operators_read_once
from .ops import add_functions, translations

OPSET = 18  # what the exporter writes without converting; ONNX Runtime and TensorRT read it
INLINE_BYTES = 1024  # smaller constants stay in the graph, where parsers look at shapes and axes
PROVIDER = "CPUExecutionProvider"
# A norm as ONNX Runtime knows it, which then makes one node of it, and no reshape of a reshape.
REWRITES = RewriteRuleSet(
    [
        RewriteRule(lambda op, x, y: op.Mul(x, op.Reciprocal(op.Sqrt(y))), lambda op, x, y: op.Div(x, op.Sqrt(y))),
        reshape_reshape_rule,
    ],
    commute=True,
)


class FunctionalProgram(FlatProgram):
    """A flat program without writes in place: what it would write is returned after its own outputs, because the ONNX
    exporter silently drops a write to an input."""

    def __init__(self, program: FlatProgram):
        names = program.lead, program.state, program.shared, program.caches, program.outputs, program.in_place
        super().__init__(program.module, *names)
        self.copied, self.written = self.written, set()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors named `self.inputs` -> tensors named `self.output_names`."""
        named = zip(self.inputs, tensors, strict=True)
        after = {name: tensor.clone() if name in self.copied else tensor for name, tensor in named}
        return (*super().forward(*after.values()), *(after[name] for name in self.inputs if name in self.copied))

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs' names in the file: the next value of input X is `next.X`."""
        names = (*self.outputs, *(name for name in self.inputs if name in self.copied))
        return tuple(NEXT + name if name in self.inputs else name for name in names)


def lower(graphs: Assembled, directory: Path, progress: OnProgress) -> Lowered:
    """Write NAME.onnx for each program and the weights file."""
    exported, models, programs = {}, {}, {}
    for name, program in graphs.programs.items():
        progress(f"tracing {name}")
        functional = FunctionalProgram(program)
        exported[name] = export_program(functional, graphs.spec)
        progress(f"translating {name} ({len(exported[name].graph.nodes)} nodes)")
        models[name] = to_onnx(exported[name], functional)
        programs[name] = ProgramSpec(f"{name}.onnx", functional.inputs, functional.output_names)
    progress("writing weights")
    write_models(models, directory)
    versions = {name: version(name) for name in ("onnx", "onnxscript")}
    described = {name: {"opset": OPSET, "tensors": _describe(model)} for name, model in models.items()}
    stages, inexact = stage_shares(exported["step"]), ["ONNX Runtime rounds as its kernels do"]
    return Lowered(programs, stages, {"providers": [PROVIDER]}, versions, inexact, {"models": described})


def to_onnx(exported: ExportedProgram, program: FunctionalProgram) -> onnx_ir.Model:
    """Translate and simplify, our ops still without their functions."""
    copy_committed(exported)
    for name in ("torch.onnx", "onnx_ir"):  # they tell of optional packages, and of what they leave as it is
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), operators_read_once():  # the exporter's about itself
        result = torch.onnx.export(
            exported,
            dynamo=True,
            verbose=False,
            optimize=False,  # would put the functions' bodies in place of our nodes
            opset_version=OPSET,
            input_names=list(program.inputs),
            output_names=list(program.output_names),
            custom_translation_table=translations(),
        )
    assert result is not None and result.exported_program is not None
    lost = result.exported_program.graph_signature.user_inputs_to_mutate  # the exporter drops these silently
    if lost:
        raise AssertionError(f"written in place: expected nothing, got {sorted(map(str, lost.values()))}")
    model = result.model
    optimizer.fold_constants_ir(model)
    REWRITES.apply_to_model(model)
    for simplify in (
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        simplify(model)
    for value, name in zip(model.graph.outputs, program.output_names, strict=True):
        value.name = name  # two that are equal were one
    _name_dimensions(model)
    check_readers(model, program)
    return model


def _name_dimensions(model: onnx_ir.Model) -> None:
    """Call the dynamic dimensions of inputs by SIZES, `rows`, `tokens` and `slots`, wherever they appear: ONNX Runtime
    plans memory by the shapes in between, and takes twice as long to plan without them. Other dynamic sizes get no
    name."""
    names = dict[Any, str]()
    for value in model.graph.inputs:
        axes = (value.name,) if value.name in SIZES else ("rows", "tokens", "slots")
        own = {size.value: axes[i] for i, size in enumerate(value.shape or ()) if not isinstance(size, int)}
        names = own | names  # that of SIZES where a size has two
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([n if isinstance(n, int) else names.get(n.value) for n in value.shape])


def check_readers(model: onnx_ir.Model, program: FunctionalProgram) -> None:
    """A session binds a cache's input and output to the same memory: one node reads the input, and the output is what
    became of it. Raises AssertionError."""
    written = dict(zip(program.output_names, model.graph.outputs, strict=True))
    for value in model.graph.inputs:
        if value.name not in program.caches:
            continue
        readers = [use.node for use in value.uses() if use.node.op_type != "Shape"]
        source = written[f"{NEXT}{value.name}"]
        while source.producer() is not None:
            source = source.producer().inputs[0]
        if len(readers) > 1 or source is not value:
            raise AssertionError(
                f"{value.name}: expected one node that reads it, on the way to its output, got "
                f"{[node.name for node in readers]}, and an output that is made of {source.name}"
            )


def _describe(model: onnx_ir.Model) -> dict[str, dict[str, Any]]:
    """dtype and shape of each input and output, as `inspect` shows them."""
    return {
        str(value.name): {
            "dtype": value.dtype.numpy().name if value.dtype else "",
            "shape": [getattr(n, "value", n) for n in value.shape or ()],
        }
        for value in (*model.graph.inputs, *model.graph.outputs)
    }


def write_models(models: dict[str, onnx_ir.Model], directory: Path) -> None:
    """Write the models, functions included, and all large initializers once, as external data: the tensors of an
    ordinary safetensors file."""
    tensors = {name: _large_tensors(model) for name, model in models.items()}
    stored = write_weights(directory, tensors)
    places = _places(directory / WEIGHTS)
    for name, model in models.items():
        for initializer, tensor in model.graph.initializers.items():
            if initializer in stored[name]:
                offset, length = places[stored[name][initializer]]
                held = tensor.const_value
                assert held is not None
                tensor.const_value = onnx_ir.ExternalTensor(
                    WEIGHTS, offset, length, held.dtype, shape=held.shape, name=initializer, base_dir=directory
                )
        proto = onnx_ir.to_proto(model)
        onnx.helper.set_model_props(proto, {LAYOUT: layout_of(directory / WEIGHTS)})  # offsets hold for that alone
        add_functions(proto)
        path = directory / f"{name}.onnx"
        path.write_bytes(proto.SerializeToString(deterministic=True))
        onnx.checker.check_model(path)


def _large_tensors(model: onnx_ir.Model) -> dict[str, Tensor]:
    """Initializers that go to the weights file, by name."""
    large = {}
    for name, value in model.graph.initializers.items():
        held = value.const_value
        if held is not None and held.nbytes > INLINE_BYTES:
            raw = held.raw  # a parameter as it is, so that all models share it; or what was folded
            large[name] = raw if isinstance(raw, Tensor) else torch.from_numpy(held.numpy().copy())
    return large


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and length of each tensor in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (8 + size + start, end - start) for name, (start, end) in spans.items()}

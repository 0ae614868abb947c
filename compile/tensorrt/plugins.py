"""Our plugins for TensorRT: ahead-of-time plugins, whose PTX the builder embeds in the engine.

Such an engine needs neither Python nor these plugins at run time. The parser finds only plugins that are registered.
"""

import inspect
from collections.abc import Sequence
from types import GenericAlias, SimpleNamespace
from typing import Any

from ...kernels.plugin import DYNAMIC, NAMESPACE, Plugin
from ...kernels.plugins import PLUGINS
from ...kernels.ptx import compile_ptx


def register(trt: Any, trtp: Any, capability: int) -> None:
    """Register every plugin with `trtp`, the module `tensorrt.plugin` of `trt`, once: a second call changes nothing.
    Kernels are compiled for this compute capability, e.g. 90, that of the GPU at hand."""
    if NAMESPACE in vars(trtp.op):
        return
    for plugin in PLUGINS:
        identifier = f"{NAMESPACE}::{plugin.name}"
        trtp.register(identifier)(_descriptor(plugin, trt, trtp))
        trtp.aot_impl(identifier)(_implementation(plugin, trt, trtp, capability))


def _descriptor(plugin: Plugin, trt: Any, trtp: Any) -> Any:
    """The function that tells TensorRT the outputs' shapes and dtypes. TensorRT reads its signature."""
    names, dims = _dtypes(trt), SimpleNamespace(constant=trtp.ShapeExpr, max=trtp.max, min=trtp.min)
    types = {name: kind for kind, name in names.items()}

    def describe(*inputs: Any, **attributes: Any) -> Any:
        shapes = plugin.named([tuple(tensor.shape_expr) for tensor in inputs])
        dtype = plugin.dtype([names[tensor.dtype] for tensor in inputs])
        outputs = []
        for index, shape in enumerate(plugin.output_shapes(shapes, attributes, dims)):
            kind = list(plugin.outputs.values())[index]
            if index in plugin.aliases:
                outputs.append(inputs[plugin.aliases[index]].aliased())
            else:
                outputs.append(trtp.from_shape_expr(tuple(shape), types[kind if kind in types else dtype]))
        return tuple(outputs)

    tensors = [_parameter(name, trtp.TensorDesc) for name in plugin.inputs]
    attributes = [_parameter(name, kind) for name, kind in plugin.attributes.items()]
    returns = GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))
    describe.__signature__ = inspect.Signature([*tensors, *attributes], return_annotation=returns)  # type: ignore
    return describe


def _implementation(plugin: Plugin, trt: Any, trtp: Any, capability: int) -> Any:
    """The function that compiles a kernel and returns its launch, from inputs, attributes, outputs and a tactic."""
    names = _dtypes(trt)

    def implement(*arguments: Any) -> Any:
        count = len(plugin.inputs)
        inputs, values, outputs = arguments[:count], arguments[count:-2], arguments[-2]
        attributes = dict(zip(plugin.attributes, values, strict=True))
        tensors = (*inputs, *outputs)
        known = plugin.named([_sizes(tensor.shape) for tensor in tensors])
        dtype = plugin.dtype([names[tensor.dtype] for tensor in inputs])
        binary = compile_ptx(plugin.case(dtype, known, attributes), capability)
        shapes = plugin.named([tuple(tensor.shape_expr) for tensor in tensors])
        launch = trtp.KernelLaunchParams()
        launch.grid_x, launch.grid_y, launch.grid_z = plugin.grid(shapes, binary.constants)
        launch.block_x, launch.shared_mem = binary.threads, binary.shared
        scalars = trtp.SymIntExprs.from_tuple([trtp.SymInt32(scalar) for scalar in plugin.scalars(shapes)])
        return binary.entry, binary.ptx, launch, scalars

    names_in_order = [*plugin.inputs, *plugin.attributes, "outputs", "tactic"]
    returns = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    implement.__signature__ = inspect.Signature(  # type: ignore
        [_parameter(name) for name in names_in_order], return_annotation=returns
    )
    return implement


def _parameter(name: str, annotation: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation)


def _sizes(shape: Sequence[int]) -> list[int]:
    return [size if size >= 0 else DYNAMIC for size in shape]


def _dtypes(trt: Any) -> dict[Any, str]:
    return {
        trt.int64: "int64", trt.int32: "int32", trt.bool: "bool",
        trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16",
    }  # fmt: skip

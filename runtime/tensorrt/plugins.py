"""Our plugins for TensorRT for RTX: V3 plugins that launch the kernels through the CUDA driver.

A plan carries each plugin's PTX for every compute capability it was built for, so that a runtime needs no compiler.
Importing this module loads TensorRT for RTX: it raises `LibraryError` where that is not installed.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...kernels.plugin import DYNAMIC, NAMESPACE, VERSION, Plugin
from ...kernels.plugins import PLUGINS
from ...kernels.ptx import Binary, compile_ptx
from .driver import driver
from .library import load_library

trt: Any = load_library("tensorrt-rtx")

DTYPES = {
    trt.int64: "int64", trt.int32: "int32", trt.bool: "bool",
    trt.float32: "float32", trt.float16: "float16", trt.bfloat16: "bfloat16",
}  # fmt: skip
FIELD_TYPES = {int: (trt.PluginFieldType.INT64, np.int64), float: (trt.PluginFieldType.FLOAT32, np.float32)}
STATE = "state"  # the one field of a serialized plugin


class Dim:
    """An expression over dimensions, as TensorRT builds them."""

    def __init__(self, expression: Any, builder: Any):
        self.expression, self.builder = expression, builder

    def combine(self, operation: Any, other: Any) -> "Dim":
        """This operation on this dimension and another or an int."""
        right = other.expression if isinstance(other, Dim) else self.builder.constant(int(other))
        return Dim(self.builder.operation(operation, self.expression, right), self.builder)

    __add__ = functools.partialmethod(combine, trt.DimensionOperation.SUM)
    __sub__ = functools.partialmethod(combine, trt.DimensionOperation.SUB)
    __mul__ = functools.partialmethod(combine, trt.DimensionOperation.PROD)
    __floordiv__ = functools.partialmethod(combine, trt.DimensionOperation.FLOOR_DIV)


class Dims:
    """`constant`, `max` and `min` for `Plugin.output_shapes`."""

    def __init__(self, builder: Any):
        self.builder = builder

    def constant(self, value: int) -> Dim:
        return Dim(self.builder.constant(value), self.builder)

    def max(self, first: Dim, second: Any) -> Dim:
        return first.combine(trt.DimensionOperation.MAX, second)

    def min(self, first: Dim, second: Any) -> Dim:
        return first.combine(trt.DimensionOperation.MIN, second)


class RtxPlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime):
    """One node. `binaries`: compute capability -> kernel, compiled when the node's shapes and dtypes are known."""

    def __init__(self, plugin: Plugin, attributes: dict[str, Any], binaries: dict[int, Binary | None]):
        for base in RtxPlugin.__bases__:
            base.__init__(self)
        self.plugin_name, self.plugin_namespace, self.plugin_version = plugin.name, NAMESPACE, VERSION
        self.num_outputs = len(plugin.outputs)
        self.plugin, self.attributes, self.binaries = plugin, attributes, binaries

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def clone(self) -> "RtxPlugin":
        return RtxPlugin(self.plugin, self.attributes, dict(self.binaries))

    def attach_to_context(self, context: Any) -> "RtxPlugin":
        return self.clone()

    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        given = [DTYPES[kind] for kind in input_types]
        named = {name: kind for kind, name in DTYPES.items()}
        return [named.get(kind) or named[self.plugin.dtype(given)] for kind in self.plugin.outputs.values()]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        shapes = self.plugin.named([[Dim(dim, builder) for dim in shape] for shape in inputs])
        outputs = self.plugin.output_shapes(shapes, self.attributes, Dims(builder))
        plain = [[dim if isinstance(dim, Dim) else Dims(builder).constant(dim) for dim in shape] for shape in outputs]
        return [trt.DimsExprs([dim.expression for dim in shape]) for shape in plain]

    def get_aliased_input(self, output: int) -> int:
        return self.plugin.aliases.get(output, -1)

    def supports_format_combination(self, position: int, tensors: Sequence[Any], inputs: int) -> bool:
        dtypes = [DTYPES.get(tensor.desc.type, "") for tensor in tensors[: position + 1]]
        linear = tensors[position].desc.format == trt.TensorFormat.LINEAR
        return linear and self.plugin.accepts(position, dtypes)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        tensors = [tensor.desc for tensor in (*inputs, *outputs)]
        shapes = self.plugin.named([[dim if dim >= 0 else DYNAMIC for dim in tensor.dims] for tensor in tensors])
        dtype = self.plugin.dtype([DTYPES[tensor.type] for tensor in tensors[: len(inputs)]])
        case = self.plugin.case(dtype, shapes, self.attributes)
        self.binaries = {capability: compile_ptx(case, capability) for capability in self.binaries}

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return 0

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        return None

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        return None

    def get_fields_to_serialize(self) -> Any:
        field = trt.PluginField(STATE, pack(self.attributes, self.binaries), trt.PluginFieldType.UNKNOWN)
        self.fields = trt.PluginFieldCollection([field])  # TensorRT reads it after this call
        return self.fields

    def enqueue(
        self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
    ) -> None:
        binary = self.binaries[driver().capability()]
        assert binary is not None
        shapes = self.plugin.named([tuple(desc.dims) for desc in (*input_desc, *output_desc)])
        arguments = [
            *map(ctypes.c_uint64, inputs),
            *map(ctypes.c_int32, self.plugin.scalars(shapes)),
            *map(ctypes.c_uint64, outputs),
        ]
        function = driver().function(binary.ptx, binary.entry)
        grid = self.plugin.grid(shapes, binary.constants)
        driver().launch(function, grid, binary.threads, binary.shared, stream, arguments)


class Creator(trt.IPluginCreatorV3One):
    """Makes the nodes of one plugin: from an ONNX node's attributes, or from what a plan holds."""

    def __init__(self, plugin: Plugin, capabilities: Sequence[int]):
        super().__init__()
        self.name, self.plugin_namespace, self.plugin_version = plugin.name, NAMESPACE, VERSION
        self.plugin, self.capabilities = plugin, capabilities
        self.empty = [trt.PluginField(name, np.array([], FIELD_TYPES[kind][1]), FIELD_TYPES[kind][0])
                      for name, kind in plugin.attributes.items()]  # fmt: skip
        self.field_names = trt.PluginFieldCollection(self.empty)

    def create_plugin(self, name: str, fields: Any, phase: Any) -> RtxPlugin:
        if phase == trt.TensorRTPhase.RUNTIME:
            return RtxPlugin(self.plugin, *unpack(bytes(next(iter(fields)).data)))
        given = {field.name: np.asarray(field.data).item() for field in fields}
        missing = set(self.plugin.attributes) - set(given)
        if missing:
            raise ValueError(f"{self.plugin.name}: expected the attributes {sorted(missing)}, got {sorted(given)}")
        attributes = {name: kind(given[name]) for name, kind in self.plugin.attributes.items()}
        return RtxPlugin(self.plugin, attributes, dict.fromkeys(self.capabilities))


@contextlib.contextmanager
def registered(capabilities: Sequence[int] = ()) -> Iterator[None]:
    """Our plugins are known to TensorRT for RTX inside the block: to the parser, which has them compiled for these
    capabilities, e.g. 89, and to a runtime, which makes them from what a plan holds."""
    registry = trt.get_plugin_registry()
    creators = [Creator(plugin, capabilities) for plugin in PLUGINS]
    for creator in creators:
        registry.register_creator(creator, NAMESPACE)
    try:
        yield
    finally:
        for creator in creators:
            registry.deregister_creator(creator)


def pack(attributes: dict[str, Any], binaries: dict[int, Binary | None]) -> bytes:
    """A plugin's state as a plan stores it."""
    kernels = {key: dataclasses.asdict(binary) for key, binary in binaries.items() if binary is not None}
    return zlib.compress(json.dumps({"attributes": attributes, "kernels": kernels}).encode())


def unpack(data: bytes) -> tuple[dict[str, Any], dict[int, Binary | None]]:
    """The inverse of `pack`."""
    state = json.loads(zlib.decompress(data))
    return state["attributes"], {int(key): Binary(**binary) for key, binary in state["kernels"].items()}

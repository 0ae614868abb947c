"""Build every plugin through TensorRT's own Python layer, without its libraries. compile/test_tensorrt_plugins.py
runs this.

The bindings come from their wheel. The ten C functions that they link to are stubs; what TensorRT's builder would hand
to a plugin (symbolic dimensions, tensor descriptions) are plain objects of the same interface. Prints a line of JSON
for each plugin.
"""

import ctypes
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specstep.kernels.model_sizes import ModelSizes

SYMBOLS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
MODEL = ModelSizes("bfloat16", 64, 48, batch=2, heads=9, kv_heads=3, nodes=8)


def load_bindings(folder: Path) -> Any:
    """The module `tensorrt`, over stub libraries."""
    major = version("tensorrt-cu13-bindings").split(".")[0]
    (folder / "stub.c").write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in SYMBOLS))
    for name in ("nvinfer", "nvonnxparser", "nvinfer_plugin"):
        library = f"lib{name}.so.{major}"
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library}", str(folder / "stub.c"), "-o"]
        subprocess.run([*command, str(folder / library)], check=True)
        ctypes.CDLL(str(folder / library), ctypes.RTLD_GLOBAL)
    trt = sys.modules["tensorrt"] = import_module("tensorrt_bindings")
    sys.modules["tensorrt.plugin"] = import_module("tensorrt_bindings.plugin")
    return trt


class Expression:
    """A dimension, known at once."""

    def __init__(self, value: int):
        self.value = value

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


class Scalars(dict[int, int]):
    """Takes a kernel's scalar arguments one by one, and their number as an attribute."""


def main(folder: Path) -> None:
    trt = load_bindings(folder)
    trtp = import_module("tensorrt.plugin")
    lib, tensor, classes = (
        import_module(f"tensorrt_bindings.plugin.{name}") for name in ("_lib", "_tensor", "_plugin_class")
    )
    kinds = trt.DimensionOperation
    operations = {
        kinds.SUM: lambda a, b: a + b, kinds.SUB: lambda a, b: a - b, kinds.PROD: lambda a, b: a * b,
        kinds.FLOOR_DIV: lambda a, b: a // b, kinds.MAX: max, kinds.MIN: min,
    }  # fmt: skip
    builder = SimpleNamespace(
        constant=Expression, operation=lambda kind, a, b: Expression(operations[kind](a.value, b.value))
    )

    def proxy(**replaced: Any) -> Any:  # the module, but for types that only TensorRT's library can make
        return type("Proxy", (), {"__getattr__": lambda self, name: replaced.get(name) or getattr(trt, name)})()

    tensor.trt, classes.trt = proxy(IDimensionExpr=Expression), proxy(DimsExprs=lambda count: [None] * count)
    tensor.SymExprImpl = lambda expression: expression._expr.value
    lib._register_plugin_creator = lambda *arguments: None  # there is no registry

    from specstep.compile.tensorrt.plugins import register
    from specstep.kernels.plugins import PLUGINS
    from specstep.kernels.ptx import parameters

    register(trt, trtp, 90)
    register(trt, trtp, 90)  # as a second build does
    dtypes = {"int64": trt.int64, "int32": trt.int32, "bool": trt.bool, "float32": trt.float32, "float": trt.bfloat16}
    for plugin in PLUGINS:
        inputs, made = MODEL.inputs[plugin.name], lib.QDP_REGISTRY[f"specstep::{plugin.name}"]
        attributes = {name: MODEL.attributes[name] for name in plugin.attributes}
        node = classes._TemplateAOTPlugin(plugin.name, "specstep", made.num_outputs)
        node.init(made.register_func, attributes, made.aot_impl_attr_names, made.aot_impl_func, None, None)
        node.set_tactic(0)
        types = [dtypes[kind] for kind in plugin.inputs.values()]
        types += node.get_output_data_types(types, [len(shape) for shape in inputs])
        given = [[Expression(size) for size in shape] for shape in inputs]
        outputs = [[size.value for size in shape] for shape in node.get_output_shapes(given, [], builder)]
        described = []
        for kind, shape in zip(types, [*inputs, *outputs], strict=True):
            item, described_item = trt.PluginTensorDesc(), trt.DynamicPluginTensorDesc()
            item.type, item.dims, item.format = kind, trt.Dims(tuple(shape)), trt.TensorFormat.LINEAR
            described_item.desc = item
            described.append(described_item)
        launch, scalars = SimpleNamespace(), Scalars()
        tensor.SymIntExpr._exprBuilder = builder
        node.get_launch_params(None, described, len(plugin.inputs), launch, scalars, builder)
        ((entry, ptx),) = node.kernel_map.values()
        line = {"name": plugin.name, "outputs": outputs, "dtypes": [kind.name for kind in types[len(plugin.inputs) :]]}
        line |= {"aliases": node.aliased_map, "launch": vars(launch), "scalars": list(scalars.values())}
        print(json.dumps(line | {"entry": entry, "parameters": len(parameters(ptx, entry))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

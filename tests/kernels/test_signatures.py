"""The torch op, the ONNX function and the TensorRT plugin of a kernel take the same arguments in the same order."""

from typing import Any

import pytest
import torch

pytest.importorskip("onnxscript")

from specstep.compile.onnx.ops import NODES
from specstep.kernels.plugins import PLUGINS

FUNCTIONS = {function.name: function for function in NODES}
KINDS = {"FLOAT": "float32", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}


def described(values: Any) -> dict[str, str]:
    """Name of each tensor -> its dtype, "float" for the engine's own."""
    kinds = {value.name: [str(kind) for kind in value.type_constraint.allowed_types] for value in values}
    return {name: KINDS[kind[0]] if len(kind) == 1 else "float" for name, kind in kinds.items()}


@pytest.mark.parametrize("plugin", [p for p in PLUGINS if p.name in FUNCTIONS], ids=lambda plugin: plugin.name)
def test_plugins_are_their_onnx_functions(plugin: Any) -> None:
    signature = FUNCTIONS[plugin.name].op_signature
    assert described(signature.inputs) == plugin.inputs
    assert [*described(signature.inputs)] == [*plugin.inputs]
    assert [kind for _, kind in sorted(plugin.attributes.items())] == [
        {"INT": int, "FLOAT": float}[attribute.type.name]
        for attribute in sorted(signature.attributes, key=lambda attribute: attribute.name)
    ]
    outputs = [*described(signature.outputs).values()]
    assert outputs == [*plugin.outputs.values()][: len(outputs)]
    assert [*plugin.outputs][len(outputs) :] in ([], ["scratch"])


@pytest.mark.parametrize("name", ["tree_layout", "choose", "accept", "compacted", "top_log_probs"])
def test_torch_ops_are_their_onnx_functions(name: str) -> None:
    """Those whose nodes are written as torch calls them."""
    signature = FUNCTIONS[name.removesuffix("ed")].op_signature
    schema = getattr(torch.ops.specstep, name).default._schema
    assert [argument.name for argument in schema.arguments] == [parameter.name for parameter in signature.params]
    assert len(schema.returns) == len(signature.outputs)


def test_attention_takes_the_inputs_of_its_split() -> None:
    """The ONNX function's last input, the sinks, is the merge's."""
    split = next(plugin for plugin in PLUGINS if plugin.name == "tree_attention_split")
    signature = FUNCTIONS["tree_attention"].op_signature
    assert described(signature.inputs[:-1]) == split.inputs and signature.inputs[-1].name == "sinks"
    assert [attribute.name for attribute in signature.attributes] == [*split.attributes]

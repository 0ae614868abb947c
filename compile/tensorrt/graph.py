"""Turns an engine's ONNX graph into the one that TensorRT parses: our ops as plugin nodes or as what their functions
say, constant sizes fixed.

TensorRT's parser silently prefers a local function of the same name for nodes inside other functions, and whenever the
plugin's namespace does not match. No function is left, so that a missing plugin is a parse error.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper
from onnx.inliner import inline_local_functions
from onnx_ir.passes import common as passes
from onnxscript import INT64, optimizer, script
from onnxscript import opset18 as onnx_op
from onnxscript.rewriter import RewriteRule, RewriteRuleSet

from ...kernels.noise_onnx import noise_key
from ...kernels.onnx_domain import OPS
from ...kernels.plugin import NAMESPACE
from ...kernels.plugins import PLUGINS
from ...runtime.engine_file import NEXT
from ..onnx.ops import PLUGIN_ATTRIBUTES

# Weights as right operands: the product that TensorRT knows best. ONNX Runtime reads them faster as left ones.
WEIGHTS_RIGHT = RewriteRule(
    lambda op, x, w: op.Transpose(op.MatMul(w, op.Transpose(x, perm=[1, 0])), perm=[1, 0]),
    lambda op, x, w: op.Gemm(x, w, transB=1),
    remove_nodes=False,  # layers share the transposed x
)


def _expert_linear(op: Any, x: Any, weight: Any, experts: Any, transB: Any) -> Any:
    """TensorRT cannot loop over the experts in use: each pair of token and expert gathers its weight."""
    held = op.Gather(weight, experts)
    column = op.Constant(value_ints=[2 if transB.as_int() else 1])
    rows = op.Unsqueeze(x, column)
    return op.Squeeze(op.MatMul(held, rows) if transB.as_int() else op.MatMul(rows, held), column)


EXPERTS = RewriteRule(
    lambda op, x, weight, experts, transB: op.expert_linear(x, weight, experts, transB=transB, _domain=NAMESPACE),
    _expert_linear,
)
FOR_TENSORRT = RewriteRuleSet([WEIGHTS_RIGHT, EXPERTS])


@script(OPS, default_opset=onnx_op)
def noise_round(x: INT64) -> INT64:
    """See `noise._round`, of x modulo 2**32. TensorRT shifts nothing, and no sum of this leaves an int64."""
    word = onnx_op.Mod(x, 4294967296)
    low = onnx_op.Mod(word, 65536)
    word = onnx_op.Mod(low * (word + word - low) * 2 + word, 4294967296)
    high = word / 65536
    return high + (word - high * 65536) * 65536


@script(OPS, default_opset=onnx_op)
def noise_bits(seeds: INT64, positions: INT64, tokens: INT64) -> INT64:
    """See `noise.noise_bits`. The rounds of all tokens are a loop: TensorRT for RTX builds for many minutes where it
    joins them with what adds the noise."""
    low, high = onnx_op.Mod(seeds, 4294967296), seeds / 4294967296
    second = noise_key(low + 0x85EBCA6B, high, positions)
    word = noise_key(low + 0x9E3779B9, high, positions) + tokens
    done = onnx_op.Constant(value_int=0)
    go_on = done < 3
    while go_on:
        word = noise_round(word + onnx_op.Where(done == 1, second, 0))
        done = done + 1
        go_on = done < 3
    return word


NOISE = (noise_round, noise_bits)


def use_plugins(model: ModelProto) -> Counter[str]:
    """Replace our ops and the cache writes by plugin nodes, in place -> how many of each plugin there must be."""
    write_caches_in_place(model)
    plugins = {plugin.name: plugin for plugin in PLUGINS}
    kept = [function for function in model.functions if function.name not in {*plugins, "tree_attention"}]
    del model.functions[:]
    model.functions.extend([*kept, _tree_attention(model)])
    counts = Counter(node.op_type for node in model.graph.node if node.domain == NAMESPACE)
    attentions = counts.pop("tree_attention", 0)
    if attentions:
        counts |= {"tree_attention_split": attentions, "tree_attention_merge": attentions}
    unknown = set(counts) - set(plugins) - {function.name for function in kept}
    if unknown:
        raise AssertionError(f"ops of domain {NAMESPACE}: expected a plugin for each, got none for {sorted(unknown)}")
    for node in model.graph.node:
        if node.domain == NAMESPACE and node.op_type in plugins:  # outputs that are memory for the kernel
            own = list(plugins[node.op_type].outputs)[len(node.output) :]
            node.output.extend(f"{node.output[0]}.{name}" for name in own)
    return Counter({name: count for name, count in counts.items() if name in plugins})


def _tree_attention(model: ModelProto) -> FunctionProto:
    """The function `tree_attention` over two plugin nodes. A plugin is one kernel and the op takes two: over splits of
    the cache, and to merge them."""
    inputs = ["q", "k", "v", "lengths", "depths", "ancestors", "key_depths", "sinks"]
    split = _plugin_node("tree_attention_split", inputs[:-1], ["split_out", "split_norm"])
    kinds = {"scale": AttributeProto.FLOAT, "window": AttributeProto.INT, "softcap": AttributeProto.FLOAT}
    split.attribute.extend(AttributeProto(name=name, ref_attr_name=name, type=kind) for name, kind in kinds.items())
    nodes = [
        split,
        helper.make_node("CastLike", ["sinks", "q"], ["typed_sinks"]),
        _plugin_node("tree_attention_merge", ["split_out", "split_norm", "typed_sinks"], ["out"]),
    ]
    attributes = ["scale", "window", "softcap", *PLUGIN_ATTRIBUTES]
    return helper.make_function(NAMESPACE, "tree_attention", inputs, ["out"], nodes, model.opset_import, attributes)


def _plugin_node(op_type: str, inputs: list[str], outputs: list[str]) -> NodeProto:
    return helper.make_node(op_type, inputs, outputs, name=outputs[0], domain=NAMESPACE, **PLUGIN_ATTRIBUTES)


def write_caches_in_place(model: ModelProto) -> None:
    """Replace ScatterND on a cache by the `cache_write` plugin, and remove nodes that return a cache unchanged."""
    graph = model.graph
    inputs = [value.name for value in graph.input if value.name.startswith(("keys.", "values."))]
    outputs = {value.name for value in graph.output}
    caches, renamed, kept = set(inputs), dict[str, str](), list[NodeProto]()
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if node.input and node.input[0] in caches:
            if _is_identity(node) and node.output[0] not in outputs:
                renamed[node.output[0]] = node.input[0]
                continue
            if node.op_type == "ScatterND":
                node = _plugin_node("cache_write", list(node.input), list(node.output))
            if node.op_type in ("cache_write", "compact") or _is_identity(node):
                caches.add(node.output[0])
        kept.append(node)
    copied = [name for name in inputs if NEXT + name not in caches]
    if copied:  # a session binds input and output to the same memory
        raise AssertionError(f"caches: expected writes by plugins alone, got others on {copied[:3]}")
    del graph.node[:]
    graph.node.extend(kept)


def _is_identity(node: NodeProto) -> bool:
    if node.op_type == "Transpose":
        return helper.get_node_attr_value(node, "perm") == [0, 1, 2, 3]
    return node.op_type == "Identity"


def without_functions(model: ModelProto, folder: Path) -> ModelProto:
    """Put what our ops' functions say in place of their nodes, and the first branch in place of each If: not all that
    hold constants can be built by TensorRT for RTX, nor any inside another one. `folder` holds the weights."""
    noise = {function.name: function.to_function_proto() for function in NOISE}
    functions = [noise.get(function.name, function) for function in model.functions]
    del model.functions[:]
    model.functions.extend(functions)
    inlined = onnx_ir.from_proto(inline_local_functions(model))
    onnx_ir.external_data.set_base_dir(inlined.graph, folder)
    optimizer.fold_constants(inlined)  # branches on attributes, of which one alone holds
    use_first_branches(inlined.graph)
    passes.NameFixPass()(inlined)
    optimizer.fold_constants(inlined)
    optimizer.remove_unused_nodes(inlined)
    return onnx_ir.to_proto(inlined)


def use_first_branches(graph: onnx_ir.Graph) -> None:
    """Replace each If by its first branch, which holds whatever the condition is (see `kernels/choose/onnx.py`)."""
    while found := [node for node in graph if node.op_type == "If"]:
        for node in found:
            branch = node.attributes["then_branch"].as_graph()
            outputs, nodes = list(branch.outputs), list(branch)
            branch.outputs.clear()
            branch.remove(nodes)
            graph.insert_before(node, nodes)
            for name, value in list(branch.initializers.items()):
                del branch.initializers[name]
                value.name = f"{node.outputs[0].name}.{name}"
                graph.register_initializer(value)
            for before, after in zip(node.outputs, outputs, strict=True):
                after.name, after.type = before.name, after.type or before.type
                before.replace_all_uses_with(after, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def fix_sizes(model: ModelProto, sizes: Mapping[str, Mapping[int, int | str]]) -> None:
    """Make dimensions of graph inputs constant, or one with those of a name: input -> dimension -> size or name.
    Inferred shapes are dropped."""
    for value in model.graph.input:
        for dimension, size in sizes.get(value.name, {}).items():
            value.type.tensor_type.shape.dim[dimension].Clear()
            field = "dim_value" if isinstance(size, int) else "dim_param"
            setattr(value.type.tensor_type.shape.dim[dimension], field, size)
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def load_graph(path: Path) -> ModelProto:
    """An ONNX file as TensorRT wants it, without the weights beside it."""
    model = onnx_ir.load(path)
    FOR_TENSORRT.apply_to_model(model)
    optimizer.remove_unused_nodes(model)
    return onnx_ir.to_proto(model)

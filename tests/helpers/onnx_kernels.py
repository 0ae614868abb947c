"""Run the ONNX function of a kernel in ONNX Runtime on torch tensors."""

from functools import cache
from typing import Any

import onnxruntime
import torch
from onnx import TensorProto, helper
from specstep.compile.onnx.ops import DOMAIN, add_functions
from torch import Tensor

TYPES = {
    torch.int64: TensorProto.INT64, torch.int32: TensorProto.INT32, torch.int8: TensorProto.INT8,
    torch.bool: TensorProto.BOOL, torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16,
}  # fmt: skip


def tree_layout(parents: Tensor, valid: Tensor) -> list[Tensor]:
    return run("tree_layout", [parents, valid], {}, [torch.int32, torch.int64])


def accept(*inputs: Any) -> list[Tensor]:
    return run("accept", inputs[:-1], {"max_depth": inputs[-1]}, [torch.int64, torch.int64])


def compact(caches: list[Tensor], *where: Tensor) -> None:
    if where[1].shape[1] > 1:  # a path of the root alone: the exporter leaves the node out
        for cache in caches:
            cache.copy_(run("compact", [cache, *where], {}, [cache.dtype])[0])


def linear_attention(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, *rest: Any) -> list[Tensor]:
    rates, beta, state, parents = rest
    scale = torch.ones(value.shape[:3]) if beta is None else beta
    given = [query, key, value, factors(decay, rates), scale, torch.tensor(float(beta is not None)), state]
    name = "linear_attention" if parents is not None else "linear_attention_chain"
    return run(name, [*given, *([] if parents is None else [parents])], {}, [torch.float32, torch.float32])


def fold(state: Tensor, key: Tensor, decay: Tensor, rates: Tensor | None, *inputs: Tensor) -> None:
    state.copy_(run("fold", [state, key, factors(decay, rates), *inputs], {}, [state.dtype])[0])


def factors(decay: Tensor, rates: Tensor | None) -> Tensor:
    """As the exporter writes them."""
    return decay[..., None] if rates is None else (decay[:, :, :, None] * rates).exp()


def wkv(*inputs: Any) -> list[Tensor]:
    *given, parents = inputs
    name = "wkv_chain" if parents is None else "wkv"
    return run(name, given if parents is None else inputs, {}, [torch.float32, torch.float32])


def shift(window: Tensor, *inputs: Tensor) -> None:
    window.copy_(run("shift", [window, *inputs], {}, [window.dtype])[0])


def tree_attention(*inputs: Any) -> Tensor:
    *tensors, scale, window, softcap, sinks = inputs
    sinks = torch.full((tensors[0].shape[1],), -torch.inf) if sinks is None else sinks
    attributes = {"scale": scale, "window": window, "softcap": softcap}
    return run("tree_attention", [*tensors, sinks], attributes, [tensors[0].dtype])[0]


def choose(*inputs: Any) -> Tensor:
    return run("choose", inputs, {}, [torch.int64])[0]


def top_log_probs(logits: Tensor, *inputs: Any) -> list[Tensor]:
    nodes, wanted, heat, seeds, positions, ids, top, *mask = inputs
    ids = torch.arange(logits.shape[2]) if ids is None else ids
    words = (*logits.shape[:2], -(-logits.shape[2] // 32))
    mask = mask or [torch.zeros(words, dtype=torch.int32), torch.zeros_like(wanted)]
    tensors = [logits, nodes, wanted, heat, seeds, positions, ids, *mask]
    return run("top_log_probs", tensors, {"top": top}, [torch.int64, torch.float32, torch.float32])


def rank(*inputs: Any) -> list[Tensor]:
    return run("rank", inputs[:-1], {"top_k": inputs[-1]}, [torch.int64, torch.float32])


def run(name: str, inputs: Any, attributes: dict[str, Any], outputs: list[torch.dtype]) -> list[Tensor]:
    kinds = tuple((tensor.dtype, tensor.dim()) for tensor in inputs)
    session = _session(name, kinds, tuple(attributes.items()), tuple(outputs))
    feeds = {f"i{index}": tensor.numpy() for index, tensor in enumerate(inputs)}
    return [torch.from_numpy(array) for array in session.run(None, feeds)]


@cache
def _session(name: str, kinds: Any, attributes: Any, outputs: Any) -> onnxruntime.InferenceSession:
    """A model of one node whose dimensions are all dynamic."""
    info = helper.make_tensor_value_info
    inputs = [info(f"i{n}", TYPES[dtype], [None] * rank) for n, (dtype, rank) in enumerate(kinds)]
    results = [info(f"o{n}", TYPES[dtype], None) for n, dtype in enumerate(outputs)]
    names = [[value.name for value in values] for values in (inputs, results)]
    node = helper.make_node(name, *names, domain=DOMAIN, **dict(attributes))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], name, inputs, results), opset_imports=opsets, ir_version=10)
    add_functions(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

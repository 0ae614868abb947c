"""Every operator of the library of C++ kernels: what compiled models call, and the shapes that come of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .int8_rows import row_size
from .linear.packing import packed_shape

EXACT_FUNCTIONS = (  # of x, times y where it is given
    "silu", "sigmoid", "tanh", "gelu", "gelu_tanh", "softplus", "exp", "expm1", "log", "log1p", "cos",
    "sin",
)  # fmt: skip


class NativeOp(NamedTuple):
    """inputs: the C function's parameters, each a tensor's handle, a pointer to one where it is optional, a list of
    them, an integer or a float. outputs: how many tensors it returns; where there are none, compiled models pass a null
    pointer in their place. fake: the operator on tensors without data."""

    inputs: tuple[str, ...]
    outputs: int
    fake: Callable[..., Any]

    def declaration(self, name: str) -> str:
        """The C function, as AOTInductor's convention names it."""
        kinds = {"*": "AtenTensorHandle* {}", "#": "int64_t {}", "~": "double {}"}
        kinds["+"] = "const AtenTensorHandle* {0}, int64_t {0}_count"
        inputs = [kinds.get(given[-1], "AtenTensorHandle {}").format(given.rstrip("*#~+")) for given in self.inputs]
        outputs = [f"AtenTensorHandle* out{index}" for index in range(self.outputs)] or ["void* nothing"]
        return f"AOTITorchError aoti_torch_cpu_{name}({', '.join([*inputs, *outputs])})"


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    torch._check(x.dtype == _element_dtype(weight), lambda: f"x is {x.dtype}, the weight {weight.dtype}")
    _check_packed(weight, (), columns, x.shape[-1])
    return x.new_empty((*x.shape[:-1], columns))


def _packed_expert_linear(x: Tensor, weight: Tensor, experts: Tensor, columns: int) -> Tensor:
    torch._check(x.dtype == _element_dtype(weight), lambda: f"x is {x.dtype}, the weight {weight.dtype}")
    _check_packed(weight, weight.shape[:1], columns, x.shape[-1])
    return x.new_empty((x.shape[0], columns))


def _expert_linear(x: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    torch._check(
        x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2] and experts.shape == x.shape[:1],
        lambda: f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, experts {tuple(experts.shape)}",
    )
    return x.new_empty((x.shape[0], weight.shape[1]))


def _packed_embedding(weight: Tensor, ids: Tensor, columns: int, depth: int) -> Tensor:
    _check_packed(weight, (), columns, depth)
    return weight.new_empty((*ids.shape, depth), dtype=_element_dtype(weight))


def _check_packed(weight: Tensor, leading: tuple[int, ...], columns: int, depth: int) -> None:
    expected = (*leading, *packed_shape(weight, columns, depth))
    torch._check(
        weight.shape == expected,
        lambda: f"packed weight of {columns} columns and depth {depth}: expected {expected}, got {tuple(weight.shape)}",
    )


def _element_dtype(weight: Tensor) -> torch.dtype:
    """Of x and the result beside a packed weight: one in groups has bytes."""
    return torch.bfloat16 if weight.dtype == torch.uint8 else weight.dtype


def _rank(
    tokens: Tensor, log_probs: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    shape = (*tokens.shape[:2], top_k)
    return tokens.new_empty(shape), log_probs.new_empty(shape)


def _ngram(history: Tensor, lengths: Tensor, context: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    nodes, top_k = context.shape[:2], others[-1]
    scores = context.new_empty((*nodes, top_k), dtype=torch.float32)
    return context.new_empty(scores.shape), scores, context.new_empty(nodes)


def _choose(logits: Tensor, tokens: Tensor, *_: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape)


def _top_log_probs(
    logits: Tensor, nodes: Tensor, wanted: Tensor, temperature: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, top, _allowed, _masked = others
    log_probs = temperature.new_empty((*nodes.shape, top))
    return nodes.new_empty((*nodes.shape, top)), log_probs, temperature.new_empty(nodes.shape)


def _all_gather(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * ranks))


def _tree_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    size = row_size(v.shape[3]) if v.dtype == torch.int8 else v.shape[3]
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], size))


def _wkv(key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, channels = key.shape
    return key.new_empty(key.shape), key.new_empty((batch, tokens, 3, channels))


def _linear_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), value.new_empty(value.shape)


NATIVE_OPS = {  # "*": optional, "+": a list, "#": an integer, "~": a float
    "packed_linear": NativeOp(("x", "weight", "bias*", "columns#"), 1, _packed_linear),
    "packed_expert_linear": NativeOp(("x", "weight", "experts", "columns#"), 1, _packed_expert_linear),
    "expert_linear_native": NativeOp(("x", "weight", "experts"), 1, _expert_linear),
    "packed_embedding": NativeOp(("weight", "ids", "columns#", "depth#"), 1, _packed_embedding),
    "rank_native": NativeOp(("tokens", "log_probs", "temperature", "seeds", "positions", "top_k#"), 2, _rank),
    "ngram_native": NativeOp(
        ("history", "lengths", "context", "prediction", "predicted", "expected", "concentrations", "trust",
         "bigrams*", "keys*", "trigrams*", "probability*", "learned*", "matches#", "top_k#"), 3, _ngram
    ),
    "choose_native": NativeOp(
        ("logits", "tokens", "ancestors", "depths", "history", "lengths", "prompt_lengths", "sampling", "seeds",
         "bias_ids", "bias", "banned", "allowed", "masked"), 1, _choose
    ),
    "top_log_probs_native": NativeOp(
        ("logits", "nodes", "wanted", "temperature", "seeds", "positions", "ids*", "top#", "allowed*", "masked*"), 3,
        _top_log_probs
    ),
    **{f"exact_{name}": NativeOp(("x", "y*"), 1, _like) for name in EXACT_FUNCTIONS},
    "exact_softmax": NativeOp(("x",), 1, _like),
    "exact_mean": NativeOp(("x",), 1, lambda x: x.new_empty((*x.shape[:-1], 1))),
    "exact_sum": NativeOp(("x", "dim#"), 1, lambda x, dim: x.new_empty((*x.shape[:dim], 1, *x.shape[dim + 1 :]))),
    "exact_rms_norm": NativeOp(("x", "weight*", "epsilon~"), 1, _like),
    "exact_layer_norm": NativeOp(("x", "weight*", "bias*", "epsilon~"), 1, _like),
    "linear_attention_native": NativeOp(
        ("query", "key", "value", "decay", "rates*", "beta*", "state", "parents*"), 2, _linear_attention
    ),
    "fold_native": NativeOp(("state", "key", "decay", "rates*", "update", "path", "count"), 0, lambda *_: None),
    "wkv_native": NativeOp(("key", "value", "decay", "first", "state", "parents*"), 2, _wkv),
    "shift_native": NativeOp(("window", "inputs", "path", "count"), 0, lambda *_: None),
    "all_reduce": NativeOp(("x", "ranks#"), 1, _like),
    "all_gather": NativeOp(("x", "ranks#"), 1, _all_gather),
    "compact_native": NativeOp(("caches+", "lengths", "path", "accepted"), 0, lambda *_: None),
    "tree_attention_native": NativeOp(
        ("q", "k", "v", "lengths", "depths", "ancestors", "key_depths", "scale~", "window#", "softcap~", "sinks*"), 1,
        _tree_attention,
    ),
}  # fmt: skip

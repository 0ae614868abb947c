"""Linear attention of hybrid models over the paths of a tree: what transformers' modeling code calls, over our op.

A row keeps a state for each layer; what the tokens of a pass write to it is committed with them. Letters: B batch, T
tokens in this pass, G heads of queries and keys, H heads of values, N and P the sizes of a key and of a value.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.linear_attention.op import linear_attention
from .hybrid_cache import RecurrentState, Written

EPSILON = 1e-6  # of transformers' `l2norm`


def gated_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function over a row's state, and the original one for all else."""
    original = inspect.unwrap(original)  # without a search for faster kernels, which says that there are none

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> Any:
        """query, key [B, T, G, N], value [B, T, H, P], g, beta [B, T, H] -> [B, T, H, P], and what to write."""
        if not isinstance(initial_state, RecurrentState):
            given = {"initial_state": initial_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return original(query, key, value, g=g, beta=beta, **given, **rest)
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = normalized(query), normalized(key)
        query, decay = query * query.shape[3] ** -0.5, g.float().exp()[..., None]
        out, written = attend_linearly(initial_state, query, key, value.float(), decay, beta.float())
        return out.to(value.dtype), written

    return rule


def attend_linearly(
    state: RecurrentState, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Written]:
    """query, key [B, T, G, N], value [B, T, H, P], decay [B, T, H, N or 1], beta [B, T, H], all float32 and the pass's
    own -> what its tokens read, [B, T, H, P], and what they write."""
    where, given = state.where, {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    inputs = [None if x is None else where.with_earlier(f"{state.name}.{name}", x) for name, x in given.items()]
    out, update = linear_attention(*inputs, state.tensor, where.parents)
    return out[:, where.first_key :], Written(key, decay, update)


def normalized(x: Tensor) -> Tensor:
    """x [..., N], of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


REPLACED = {  # what transformers' modeling code calls
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
}


def has_linear_attention(model: PreTrainedModel) -> bool:
    """Whether the model's code has linear attention that can be replaced."""
    return any(hasattr(sys.modules[type(model).__module__], name) for name in REPLACED)


def register_linear_attention(model: PreTrainedModel) -> None:
    """Have the model's code call ours for the states of rows; for all else it stays as it is."""
    module = sys.modules[type(model).__module__]
    for name, replaced in REPLACED.items():
        function = getattr(module, name, None)
        if function is not None and function.__module__ != __name__:
            setattr(module, name, replaced(function))

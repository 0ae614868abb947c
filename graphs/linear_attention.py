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
from .hybrid_cache import RecurrentState, Written, take_state

EPSILON = 1e-6  # of transformers' `l2norm`


def gated_delta_rule(original: Callable[..., Any]) -> Callable[..., Any]:
    """The gated delta rule of transformers over a row's state, and the original one for all else."""
    original = inspect.unwrap(original)  # without a search for faster kernels, which says that there are none

    def rule(*given: Any, **rest: Any) -> Any:
        state = take_state()
        return original(*given, **rest) if state is None else ours(state, *given, **rest)

    def ours(
        state: RecurrentState,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Written]:
        """query, key [B, T, G, N], value [B, T, H, P], g, beta [B, T, H] -> [B, T, H, P], and what to write."""
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = normalized(query), normalized(key)
        query, decay = query * query.shape[3] ** -0.5, g.float().exp()[..., None]
        out, written = attend_linearly(state, query, key, value.float(), decay, beta.float())
        return out.to(value.dtype), written

    return rule


def mamba2_scan(original: Callable[..., Any]) -> Callable[..., Any]:
    """Mamba-2's recurrence in transformers over a row's state, and the original one for all else."""
    original = inspect.unwrap(original)

    def scan(*given: Any, **rest: Any) -> Any:
        state = take_state()
        return original(*given, **rest) if state is None else ours(state, *given, **rest)

    def ours(
        state: RecurrentState,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> tuple[Tensor, Written]:
        """x [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N], D [H] -> float32 [B, T, H, P], and what to write."""
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        decay, value = (A.float() * dt).exp()[..., None], x.float() * dt[..., None]
        out, written = attend_linearly(state, C.float(), B.float(), value, decay, None)
        return out if D is None else out + D[:, None] * x.float(), written

    return scan


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
    "mamba2_chunk_scan": mamba2_scan,
}
TRANSPOSED = "mamba2_chunk_scan"  # whose states transformers keeps as [B, H, P, N]


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


def as_kept(model: PreTrainedModel, state: Tensor) -> Tensor:
    """transformers' state of a recurrent layer -> [B, H, N, P], as rows keep it."""
    return state.transpose(2, 3).contiguous() if hasattr(sys.modules[type(model).__module__], TRANSPOSED) else state

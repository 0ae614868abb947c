"""Linear attention of hybrid models over the paths of a tree: what transformers' modeling code calls, over our op.

A row keeps a state for each layer; what the tokens of a pass write to it is committed with them. Letters: B batch, T
tokens in this pass, G heads of queries and keys, H heads of values, N and P the sizes of a key and of a value.
"""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.linear_attention.op import linear_attention
from .hybrid_cache import RecurrentState, Written, take_state

EPSILON = 1e-6  # of transformers' `l2norm`


def gated_delta_rule(
    state: RecurrentState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Written]:
    """The gated delta rule over a row's state: query, key [B, T, G, N], value [B, T, H, P], g [B, T, H] or
    [B, T, H, N], beta [B, T, H] -> [B, T, H, P], and what to write."""
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = normalized(query), normalized(key)
    query, decay = query * query.shape[3] ** -0.5, g.float().exp()
    decay = decay[..., None] if decay.dim() == 3 else decay
    out, written = attend_linearly(state, query, key, value.float(), decay, None, beta.float())
    return out.to(value.dtype), written


def mamba2_scan(
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
    """Mamba-2's recurrence over a row's state: x [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N], D [H] -> float32
    [B, T, H, P], and what to write."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    decay, value = (A.float() * dt).exp()[..., None], x.float() * dt[..., None]
    out, written = attend_linearly(state, C.float(), B.float(), value, decay, None, None)
    return out if D is None else out + D[:, None] * x.float(), written


def mamba_scan(
    state: RecurrentState,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[Tensor, Written]:
    """Mamba's recurrence over a row's state: x, dt, z [B, channels, T], A [channels, N], B, C [B, N, T], D, delta_bias
    [channels] -> [B, channels, T], and what to write."""
    dt = dt if delta_bias is None else dt + delta_bias[:, None].to(dt.dtype)
    dt, x = (torch.nn.functional.softplus(dt) if delta_softplus else dt).float(), x.float()
    heads = state.tensor.shape[1]
    value, steps = (part.transpose(1, 2).unflatten(2, (heads, -1)) for part in (dt * x, dt))
    query, key = (part.transpose(1, 2)[:, :, None].float() for part in (C, B))
    out, written = attend_linearly(state, query, key, value, steps, of_heads(A[None].float(), heads)[0], None)
    out = out.flatten(2).transpose(1, 2)
    out = out if D is None else out + x * D[:, None]
    return out if z is None else out * torch.nn.functional.silu(z), written


def attend_linearly(
    state: RecurrentState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rates: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Written]:
    """query, key [B, T, G, N], value [B, T, H, P], decay [B, T, H, ..], rates [H, N, P], beta [B, T, H], see
    `kernels.linear_attention`, all float32 and the pass's own -> what its tokens read, [B, T, H, P], and what they
    write."""
    where, given = state.where, {"query": query, "key": key, "value": value, "decay": decay}
    inputs = [where.with_earlier(f"{state.name}.{name}", x) for name, x in given.items()]
    scales = None if beta is None else where.with_earlier(f"{state.name}.beta", beta)
    out, update = linear_attention(*inputs, rates, scales, state.tensor, where.parents)
    return out[:, where.first_key :], Written(key, decay, rates, update)


def normalized(x: Tensor) -> Tensor:
    """x [..., N], of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


REPLACED: dict[str, Callable[..., Any]] = {  # what transformers' modeling code calls
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}
TRANSPOSED = "mamba2_chunk_scan"  # whose states transformers keeps as [B, H, P, N]
STATELESS = "mamba_selective_scan"  # whose states it keeps as [B, channels, N], and takes none but for a single token
HEAD = 64  # channels of Mamba to a head at most: heads are computed beside each other


def has_linear_attention(model: PreTrainedModel) -> bool:
    """Whether the model's code has linear attention that can be replaced."""
    return any(hasattr(sys.modules[type(model).__module__], name) for name in REPLACED)


def register_linear_attention(model: PreTrainedModel) -> None:
    """Have the model's code call ours for the states of rows; for all else it stays as it is."""
    module = sys.modules[type(model).__module__]
    for name, ours in REPLACED.items():
        function = getattr(module, name, None)
        if function is not None and function.__module__ != __name__:
            setattr(module, name, either(ours, function))


def either(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Ours over a row's state, and transformers' own for all else."""
    original = inspect.unwrap(original)  # without a search for faster kernels, which says that there are none

    def call(*given: Any, **rest: Any) -> Any:
        state = take_state()
        return original(*given, **rest) if state is None else ours(state, *given, **rest)

    return call


def as_kept(model: PreTrainedModel, state: Tensor) -> Tensor:
    """transformers' state of a recurrent layer -> [B, H, N, P], as rows keep it. Raises ValueError for Zamba's, whose
    layers call their scan several times."""
    if takes_no_state(model):
        if state.dim() != 3:
            raise ValueError(f"its layers scan {state.shape[1]} heads in as many calls; expected one call a layer")
        return of_heads(state, state.shape[1] // math.gcd(state.shape[1], HEAD))
    return state.transpose(2, 3).contiguous() if hasattr(sys.modules[type(model).__module__], TRANSPOSED) else state


def takes_no_state(model: PreTrainedModel) -> bool:
    """Whether a pass of transformers' code over several tokens begins anew, whatever its cache holds."""
    return hasattr(sys.modules[type(model).__module__], STATELESS)


def of_heads(state: Tensor, heads: int) -> Tensor:
    """[B, channels, N] -> [B, heads, N, channels of each]."""
    return state.unflatten(1, (heads, -1)).transpose(2, 3).contiguous()

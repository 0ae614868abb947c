# mypy: allow-untyped-defs
"""A program per token and head: its key and its value."""

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton


@triton.jit
def kv_write_kernel(
    new_keys, new_values, lengths, first, tokens, capacity,
    stride_nkb, stride_nkh, stride_nkt, stride_nkd,
    stride_nvb, stride_nvh, stride_nvt, stride_nvd,
    stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd,
    keys, values,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // tokens
    token = tl.program_id(0).to(tl.int64) % tokens
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(lengths + batch) + first + token
    inside = (slot >= 0) & (slot < capacity)

    column = tl.arange(0, BLOCK_D)
    new_keys += batch * stride_nkb + head * stride_nkh + token * stride_nkt
    key = tl.load(new_keys + column * stride_nkd, mask=column < D, other=0)
    keys += batch * stride_kb + head * stride_kh + slot * stride_ks
    tl.store(keys + column * stride_kd, key, mask=column < tl.where(inside, D, 0))

    column = tl.arange(0, BLOCK_DV)
    new_values += batch * stride_nvb + head * stride_nvh + token * stride_nvt
    value = tl.load(new_values + column * stride_nvd, mask=column < DV, other=0)
    values += batch * stride_vb + head * stride_vh + slot * stride_vs
    tl.store(values + column * stride_vd, value, mask=column < tl.where(inside, DV, 0))


def kv_write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, lengths: Tensor, first: int) -> None:
    """Launch for `reference.kv_write`. A slot outside the cache is left out."""
    batch, heads, tokens, size = new_keys.shape
    value_size = new_values.shape[3]
    wrap_triton(kv_write_kernel)[(batch * tokens, heads)](
        new_keys,
        new_values,
        lengths.contiguous(),
        first,
        tokens,
        keys.shape[2],
        *new_keys.stride(),
        *new_values.stride(),
        *keys.stride(),
        *values.stride(),
        keys,
        values,
        D=size,
        DV=value_size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_DV=triton.next_power_of_2(value_size),
        num_warps=1,
    )

"""Rows of a KV cache of eight bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specstep.kernels.int8_rows import GROUP, MOST, quantize_rows, row_bytes, row_size, widen_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(st.integers(1, 300), st.sampled_from(DTYPES), st.floats(-30, 30), st.integers(0, 2**31))
def test_each_number_is_within_half_a_step(size, dtype, power, seed):
    x = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(seed))
    x = (x * 2**power).to(dtype)
    x = x.where(x.isfinite(), 1.0)
    rows = quantize_rows(x)
    assert rows.dtype == torch.int8 and rows.shape == (3, 2, row_bytes(size)) and row_size(rows.shape[-1]) == size
    wide = widen_rows(rows)
    for group, found in zip(x.float().split(GROUP, -1), wide.split(GROUP, -1), strict=True):
        step = group.abs().amax(-1, keepdim=True) / MOST * (1 + 2**-7)  # as the scale is rounded up
        assert ((found - group).abs() <= step * 0.5001).all()


@given(st.integers(1, 5000))
def test_a_row_says_its_size(size):
    assert row_size(row_bytes(size)) == size


def test_a_row_depends_on_itself_alone():
    x = torch.randn(5, 3, 80)
    rows = quantize_rows(x)
    for i in range(5):
        assert torch.equal(quantize_rows(x[i, 1]), rows[i, 1])
    assert torch.equal(quantize_rows(x.transpose(0, 1)), rows.transpose(0, 1))


@pytest.mark.parametrize("value", [0.0, 1e-31, -1e-45])
def test_what_is_too_small_is_zero(value):
    rows = quantize_rows(torch.full((2, 16), value))
    assert not rows.any()  # as a cache is that holds nothing
    assert not widen_rows(rows).any()


def test_the_largest_floats_stay_finite():
    most = torch.finfo(torch.float32).max
    x = torch.tensor([[most, -most, 1.0]])
    wide = widen_rows(quantize_rows(x))
    assert wide.isfinite().all() and (wide[0, :2].abs() > 0.85 * most).all()


def test_what_the_compiler_makes_of_it_has_the_same_bits():
    """A row alone is computed by other code than many: no vectors, and no loop over rows."""
    compiled = torch.compile(quantize_rows, dynamic=True)
    x = torch.randn(2, 3, 9, 40).bfloat16() * 3
    rows = quantize_rows(x)
    assert torch.equal(compiled(x), rows)
    assert torch.equal(compiled(x[:1, :1, :1]), rows[:1, :1, :1])

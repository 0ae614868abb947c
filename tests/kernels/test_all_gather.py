"""What every rank has, beside each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.compile.ranks.threads import on_ranks
from specstep.kernels.all_gather.op import all_gather
from specstep.kernels.all_gather.reference import all_gather as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


def check(parts):
    got = on_ranks(len(parts), lambda rank: all_gather(parts[rank], len(parts)))
    assert all(torch.equal(each, reference(parts)) for each in got), got


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    shape=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_every_rank_has_all_parts(ranks, shape, dtype):
    check([torch.randint(-99, 99, shape).to(dtype) for _ in range(ranks)])


@pytest.mark.parametrize("columns", [1, 3, 50_001])
def test_rows_that_end_anywhere_in_a_place(columns):
    check([torch.randn(700_000 // columns, columns) for _ in range(2)])


def test_parts_with_strides():
    check([torch.randn(8, 30).t() for _ in range(3)])


def test_what_does_not_fit_is_refused():
    errors = on_ranks(2, lambda rank: all_gather(torch.ones(3), 3))
    assert all("as many ranks as there are" in str(error) for error in errors)
    errors = on_ranks(2, lambda rank: all_gather(torch.tensor(1.0), 2))
    assert all("expected x [..., N]" in str(error) for error in errors)

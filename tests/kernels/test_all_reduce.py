"""The sum of what every rank has: one order, the same bits on all, whatever the size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.compile.ranks.threads import on_ranks
from specstep.kernels.all_reduce.op import all_reduce
from specstep.kernels.all_reduce.reference import all_reduce as reference
from specstep.kernels.native import load_library

PLACE = 512 * 1024  # bytes that ranks exchange at once
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def parts_of(ranks, shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) * 10**rank for rank in range(ranks)]


def check(parts):
    got = on_ranks(len(parts), lambda rank: all_reduce(parts[rank], len(parts)))
    expected = reference(parts)
    assert all(torch.equal(each, expected) for each in got), got


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_every_rank_has_the_bits_of_the_reference(ranks, shape, dtype, seed):
    check(parts_of(ranks, shape, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bytes_", [PLACE - 4, PLACE, PLACE + 4, 3 * PLACE + 8])
def test_what_is_larger_than_a_place(bytes_, dtype):
    check(parts_of(3, (bytes_ // dtype.itemsize,), dtype))


def test_parts_with_strides_and_the_order_of_the_ranks():
    check([part.t() for part in parts_of(2, (9, 30), torch.float32)])
    big = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]  # in another order, 1
    assert reference(big).item() == 0
    check(big)


def test_every_float16_and_every_rounding():
    """Least numbers, ties and what is too large among them; a NaN stays one."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    got = on_ranks(2, lambda rank: all_reduce([every, torch.zeros_like(every)][rank], 2))[0]
    assert torch.equal(got.nan_to_num(), (every + 0.0).nan_to_num()) and torch.equal(got.isnan(), every.isnan())

    def flushing(rank):
        torch.set_flush_denormal(True)
        return all_reduce([every, torch.zeros_like(every)][rank], 2)

    flushed = on_ranks(2, flushing)[0]
    assert torch.equal(flushed.view(torch.int16), got.view(torch.int16)), "denormals of a float are others"
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        check(
            [every[torch.randperm(len(every), generator=generator)].nan_to_num(posinf=1.0, neginf=-1.0) for _ in "ab"]
        )
    ties = torch.tensor([2.0**-24, 3 * 2.0**-25, 2048.0, 65504.0, 65504.0])
    check([part.half() for part in (ties, torch.tensor([2.0**-24, 2.0**-24, 1.0, 15.0, 16.0]))])


def test_many_in_a_row_do_not_overtake_each_other():
    def run(rank):
        return [all_reduce(torch.full((7,), float(turn * (rank + 1))), 3)[0].item() for turn in range(300)]

    assert on_ranks(3, run) == [[6.0 * turn for turn in range(300)]] * 3


def test_the_reference_adds_in_the_wider_dtype():
    parts = [torch.full((1,), value, dtype=torch.bfloat16) for value in (256, 1, 1)]
    assert reference(parts).item() == 258  # 256 + 1 is 256 in bfloat16
    assert reference([part.double() for part in parts]).dtype == torch.float64


def test_what_does_not_fit_is_refused():
    load_library()
    with pytest.raises(RuntimeError, match="no communicator is bound to this thread"):
        all_reduce(torch.ones(3), 2)
    errors = on_ranks(2, lambda rank: all_reduce(torch.ones(3), 3))
    assert all("as many ranks as there are" in str(error) for error in errors)
    errors = on_ranks(2, lambda rank: all_reduce(torch.tensor(1.0), 2))
    assert all("expected x [...]" in str(error) for error in errors)
    errors = on_ranks(2, lambda rank: all_reduce(torch.ones(3).double(), 2))
    assert all("expected float32, bfloat16 or float16" in str(error) for error in errors)

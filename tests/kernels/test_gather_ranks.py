"""What every rank has of a tensor, in the order of the ranks: the collective of GPUs, whoever carries it out."""

import subprocess
import sys
from threading import BrokenBarrierError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.compile.inductor.programs import compile_programs
from specstep.compile.ranks.threads import on_ranks
from specstep.kernels.all_gather.reference import all_gather as side_by_side
from specstep.kernels.all_reduce.reference import all_reduce as sum_in_order
from specstep.kernels.gather_ranks.op import gather_ranks, gathering
from specstep.kernels.gather_ranks.reference import gather_ranks as reference
from torch import nn
from torch.export import Dim

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(deadline=None, max_examples=25)
@given(
    ranks=st.integers(1, 4),
    shape=st.lists(st.integers(0, 30), max_size=3),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
)
def test_every_rank_has_all_parts(ranks, shape, dtype, turned):
    parts = [torch.randint(-9, 9, shape).to(dtype) for _ in range(ranks)]
    parts = [part.movedim(0, -1) if turned and shape else part for part in parts]
    got = on_ranks(ranks, lambda rank: gather_ranks(parts[rank], ranks))
    assert all(torch.equal(each, reference(parts)) for each in got), got


def test_a_thread_without_a_communicator_of_so_many_ranks_is_refused():
    with pytest.raises(RuntimeError, match="expected a communicator of 2 ranks on this thread, got one of 0"):
        gather_ranks(torch.ones(3), 2)
    with (
        gathering(3, lambda x: reference([x] * 3)),
        pytest.raises(RuntimeError, match="expected a communicator of 2 ranks on this thread, got one of 3"),
    ):
        gather_ranks(torch.ones(3), 2)
    with pytest.raises(RuntimeError, match="got one of 0"):
        gather_ranks(torch.ones(3), 3)


def test_a_rank_that_fails_ends_the_others():
    def run(rank):
        if rank == 1:
            raise ValueError("no rank")
        return gather_ranks(torch.ones(2), 3)

    first, second, third = on_ranks(3, run)
    assert isinstance(first, BrokenBarrierError) and isinstance(third, BrokenBarrierError)
    assert str(second) == "no rank"


def test_the_op_needs_no_compiler():
    """It is called where engines run."""
    script = (
        "import sys, torch\n"
        "from specstep.kernels.gather_ranks.op import gather_ranks, gathering\n"
        "with gathering(2, lambda x: torch.stack([x, x])):\n"
        "    assert gather_ranks(torch.ones(3), 2).shape == (2, 3)\n"
        "print(sorted({'sympy', 'torch._dynamo', 'torch._inductor', 'triton'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


class SumAndRow(nn.Module):
    """What `all_reduce` and `all_gather` are on a GPU, and what stands around them."""

    def forward(self, x):
        parts = gather_ranks(x * 2, 2).unbind()
        return sum_in_order(parts) + 1, side_by_side(parts)


@pytest.mark.slow  # compiles
def test_a_compiled_program_gathers_on_the_thread_that_calls_it(tmp_path):
    """One program for all ranks; of bfloat16, whose sums have the reference's bits."""
    example = torch.ones(4, 8, dtype=torch.bfloat16)
    shapes = {"x": {0: Dim("rows", min=1, max=64)}}
    exported = torch.export.export(SumAndRow(), (example,), dynamic_shapes=shapes, strict=False)
    compile_programs({"sum": exported}, tmp_path, "cpu")
    parts = [torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(2)]

    def run(rank):
        loader = torch._C._aoti.AOTIModelPackageLoader(str(tmp_path / "sum.pt2"), "model", True, 1, -1)
        return [loader.run([parts[rank] + turn]) for turn in range(20)]

    for got in on_ranks(2, run):
        assert not isinstance(got, Exception), got
        for turn, (total, row) in enumerate(got):
            doubled = [(part + turn) * 2 for part in parts]
            assert torch.equal(total, sum_in_order(doubled) + 1) and torch.equal(row, side_by_side(doubled))

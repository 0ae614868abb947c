"""Loads a library of our kernels, in a process that has loaded no other, and compares what it says with the references.

python check_library.py LIBRARY INSTRUCTION_SET, with this folder and the tests' own on the path.
"""

import sys
from pathlib import Path

import conftest
import test_groups
import test_linear_attention as states
import test_tree_attention_exact as attention
import torch
from attention_case import brute_force, make_case
from specstep.kernels.linear import reference
from specstep.kernels.linear.op import packed_embedding, packed_linear
from specstep.kernels.linear.packing import pack
from specstep.kernels.linear_attention.op import linear_attention
from specstep.kernels.linear_attention.reference import linear_attention as spec
from specstep.kernels.native import load_library


def check_linear() -> None:
    """Close to the reference, and each row's bits its own."""
    for dtype in (torch.float32, torch.bfloat16):
        for columns, depth in ((5, 7), (65, 577), (33, 1536), (16, 0)):
            weight = torch.randn(columns, depth).div(max(depth, 1) ** 0.5).to(dtype)
            x, bias, packed = torch.randn(300, depth).to(dtype), torch.randn(columns).to(dtype), pack(weight)
            whole = packed_linear(x, packed, bias, columns)
            expected = reference.packed_linear(x, packed, bias, columns)
            torch.testing.assert_close(whole, expected, rtol=2**-7, atol=1e-3)
            half = depth // 2  # products that cancel: what is left is how a sum was rounded
            x[:, half : 2 * half], weight[:, half : 2 * half], weight[:, 2 * half :] = x[:, :half], -weight[:, :half], 0
            packed = pack(weight)
            whole = packed_linear(x, packed, None, columns)
            for rows in (*range(1, 40), 64):
                assert torch.equal(packed_linear(x[:rows], packed, None, columns), whole[:rows]), (dtype, columns, rows)
            assert torch.equal(packed_embedding(packed, torch.arange(columns), columns, depth), weight)
    spoilt = torch.ones(3, 3).bfloat16()
    spoilt[1] = float("nan")
    result = packed_linear(spoilt, pack(torch.ones(2, 3).bfloat16()), None, 2)
    assert result[1].isnan().all() and torch.equal(result[[0, 2]], torch.full((2, 2), 3.0).bfloat16())


def check_groups(instruction_set: str) -> None:
    """The same of weights in groups. Without fused multiply-add the bits are the reference's."""
    for kind in test_groups.GROUP_KINDS:
        test_groups.test_the_greatest_sums_of_a_group(kind)
        for columns, depth in ((5, 7), (65, 577), (33, 1536)):
            groups = test_groups.groups_of(kind, columns, depth)
            x, bias = test_groups.x_of(70, depth), torch.randn(columns).bfloat16()
            packed = test_groups.pack_groups(groups)
            result, expected = (
                packed_linear(x, packed, bias, columns),
                reference.packed_linear(x, packed, bias, columns),
            )
            torch.testing.assert_close(result, expected, **test_groups.CLOSE)
            assert instruction_set != "portable" or torch.equal(result, expected)
            for rows in range(1, 40):
                assert torch.equal(packed_linear(x[:rows], packed, bias, columns), result[:rows]), (kind, columns, rows)
            ids = torch.arange(columns)
            assert torch.equal(packed_embedding(packed, ids, columns, depth), groups.values(depth).bfloat16())


def check_attention() -> None:
    """Close to brute force, and each query's bits its own."""
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)):
        for size, options in (((64, 64), "plain"), ((40, 80), "all"), ((33, 17), "window"), ((512, 512), "sinks")):
            case = make_case(conftest._random_trees, 9, 8, 2, size[0], (0, 70, 260), dtype, value_dim=size[1])
            case = attention.with_garbage(attention.replace(case, **attention.OPTIONS[options]))
            got = attention.run(attention.tree_attention, case).double()
            torch.testing.assert_close(got, brute_force(case), rtol=tolerance, atol=tolerance)
            attention.check(attention.tree_attention, case)
        attention.test_chunks_of_a_prompt(conftest._random_trees, "window", dtype, 1)


def check_linear_attention() -> None:
    """Columns by all vectors at once, by one, and by themselves."""
    for decay_by in states.KINDS:
        for p in (64, 109):
            given, parents = states.inputs(2, 9, 2, 4, 5, p, decay_by, delta=True), states.tree(2, 9)
            for got, wanted in zip(linear_attention(*given, parents), spec(*given, parents), strict=True):
                torch.testing.assert_close(got, wanted)


if __name__ == "__main__":
    load_library(Path(sys.argv[1]))
    check_linear()
    check_groups(sys.argv[2])
    check_attention()
    check_linear_attention()

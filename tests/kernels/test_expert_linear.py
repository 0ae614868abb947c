"""Linear layers of experts: the C++ operator, torch's grouped product and the ONNX function mean the same."""

import onnx_kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.expert_linear import reference
from specstep.kernels.expert_linear.op import expert_linear, grouped
from specstep.kernels.native import load_library
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3},
    torch.float16: {"rtol": 2**-9, "atol": 2e-3},
}


def operands(pairs: int, count: int, columns: int, depth: int, dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(pairs * 7919 + columns * 31 + depth)
    shape = (count, depth, columns) if transposed else (count, columns, depth)
    x, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((pairs, depth), shape))
    return [x, weight * depth**-0.5, torch.randint(0, count, (pairs,), generator=generator)]


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.integers(0, 90), count=st.integers(1, 9), columns=st.integers(1, 70), depth=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES), transposed=st.booleans(),
)  # fmt: skip
def test_matches_reference(
    pairs: int, count: int, columns: int, depth: int, dtype: torch.dtype, transposed: bool
) -> None:
    inputs = operands(pairs, count, columns, depth, dtype, transposed)
    expected = reference.expert_linear(*inputs, transposed)
    torch.testing.assert_close(expert_linear(*inputs, transposed), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("transposed", (True, False))
@pytest.mark.parametrize("pairs", (1, 7, 100))
def test_grouped_matches_reference(pairs: int, transposed: bool) -> None:
    """What a GPU takes; torch has it on the CPU too."""
    inputs = operands(pairs, 6, 64, 48, torch.bfloat16, transposed)
    expected = reference.expert_linear(*inputs, transposed)
    torch.testing.assert_close(grouped(*inputs, transposed), expected, **TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("transposed", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
@pytest.mark.parametrize("pairs", (1, 7, 100))
def test_onnx_matches_reference(pairs: int, dtype: torch.dtype, transposed: bool) -> None:
    inputs = operands(pairs, 6, 17, 33, dtype, transposed)
    got = onnx_kernels.run("expert_linear", inputs, {"transB": int(not transposed)}, [dtype])[0]
    torch.testing.assert_close(got, reference.expert_linear(*inputs, transposed), **TOLERANCES[dtype])


def test_each_row_takes_its_own_expert() -> None:
    x, weight = torch.eye(3), torch.arange(18.0).view(2, 3, 3)
    got = expert_linear(x, weight, torch.tensor([1, 0, 1]), False)
    assert torch.equal(got, torch.stack([weight[1, :, 0], weight[0, :, 1], weight[1, :, 2]]))


def test_opcheck() -> None:
    load_library()
    inputs = operands(9, 4, 17, 33, torch.float32, False)
    torch.library.opcheck(torch.ops.specstep.expert_linear_native.default, tuple(inputs))


@pytest.mark.parametrize(
    ("x", "weight", "experts", "message"),
    [
        ((2, 5), (3, 4, 6), [0, 1], r"expected x \[P, K\], weight \[E, N, K\]"),
        ((2, 5), (3, 4, 5), [0], "of one dtype"),
        ((2, 5), (4, 5), [0, 1], "of one dtype"),
        ((2, 5), (3, 4, 5), [0, 3], "expected experts below 3, got 3"),
        ((2, 5), (3, 4, 5), [0, -1], "expected experts below 3, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(
    x: tuple[int, ...], weight: tuple[int, ...], experts: list[int], message: str
) -> None:
    load_library()
    with pytest.raises((ValueError, IndexError), match=message):
        torch.ops.specstep.expert_linear_native(torch.zeros(x), torch.zeros(weight), torch.tensor(experts))

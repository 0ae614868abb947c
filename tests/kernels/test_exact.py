"""Functions and rows whose bits do not depend on what is computed beside them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.native import load_library
from specstep.kernels.native_ops import EXACT_FUNCTIONS
from torch import Tensor
from torch.nn import functional

load_library()
MEANING = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "cos": torch.cos,
    "sin": torch.sin,
}
ROWS = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:], *scale_and_shift(x), 1e-5),
}
EDGES = [0.0, -0.0, 1e-30, -1e-5, 88.7, 89.0, -87.4, -90.0, 1e4, float("inf"), float("-inf"), float("nan")]


def scale_and_shift(x: Tensor) -> tuple[Tensor, Tensor]:
    place = (torch.arange(x.shape[-1]) % 8).to(x.dtype)
    return 1 + place / 8, place


def exact(name: str, x: Tensor) -> Tensor:
    x = x.abs() if name in ("log", "log1p") else x
    more = (*scale_and_shift(x), 1e-5) if name == "layer_norm" else (x.dim() - 1,) if name == "sum" else ()
    return getattr(torch.ops.specstep, f"exact_{name}")(x, *more)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT_FUNCTIONS)
def test_functions_are_what_torch_says(name, dtype):
    x = torch.cat([values(20_011), torch.tensor(EDGES)]).to(dtype)
    expected = MEANING[name](x.double())
    expected[expected > torch.finfo(dtype).max] = float("inf")
    if name in ("cos", "sin"):
        expected[x.isinf()] = float("nan")
    tolerance = {"rtol": 4e-7, "atol": 5e-7} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 5e-7}
    assert exact(name, x).dtype == dtype
    torch.testing.assert_close(exact(name, x).double(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 576), (5, 129), (0, 4)])
def test_rows_are_what_torch_says(name, shape, dtype):
    x = values(*shape, dtype=dtype)
    expected = ROWS[name](x.double())
    tolerance = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    if name == "sum":  # of numbers of both signs
        tolerance["atol"] *= shape[-1]
    torch.testing.assert_close(exact(name, x).double(), expected, **tolerance)


@settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(EXACT_FUNCTIONS), start=st.integers(0, 300), size=st.integers(1, 300))
def test_an_element_does_not_depend_on_its_company(name, start, size):
    x = values(20_000)
    assert torch.equal(exact(name, x[start : start + size]), exact(name, x)[start : start + size])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT_FUNCTIONS)
def test_a_product_is_the_functions_result_times_the_other_rounded_twice(name, dtype):
    joined = values(2, 5, 2 * 333, dtype=dtype)
    joined = joined.abs() if name in ("log", "log1p") else joined
    gate, up = joined[..., :333], joined[..., 333:]
    both = getattr(torch.ops.specstep, f"exact_{name}")
    for x, y in ((gate, up), (gate.contiguous(), up), (gate[:, 2], up[:, 2]), (gate.mT, up.mT), (gate[0, 0], up[0, 0])):
        assert torch.equal(both(x, y), both(x.contiguous()) * y)
    assert both(gate[:0], up[:0]).shape == (0, 5, 333)
    for wrong in (up[:, :2], up.double()):
        with pytest.raises(ValueError, match="y: expected the shape and the dtype of x"):
            both(gate, wrong)


def test_that_is_not_so_in_torch():
    x = values(20_000)
    alone = torch.stack([functional.silu(x[i : i + 1])[0] for i in range(2000)])
    assert not torch.equal(alone, functional.silu(x)[:2000])


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [1, 48, 576, 1001])
def test_a_row_does_not_depend_on_its_company(name, size):
    x = values(64, size)
    together = exact(name, x)
    for row in range(64):
        assert torch.equal(exact(name, x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("name", [*EXACT_FUNCTIONS, *ROWS])
def test_the_number_of_threads_does_not_matter(name):
    x, before = values(256, 777), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [exact(name, x) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", [*EXACT_FUNCTIONS, *ROWS])
def test_strides_do_not_matter(name):
    x = values(12, 40)
    assert torch.equal(exact(name, x.T), exact(name, x.T.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_any_dimension(dtype):
    x = values(3, 5, 7, 150, dtype=dtype)
    for dim in range(4):
        expected = x.double().sum(dim, keepdim=True)
        got = torch.ops.specstep.exact_sum(x, dim)
        torch.testing.assert_close(got.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5)
        for row in range(3 if dim else 0):
            assert torch.equal(torch.ops.specstep.exact_sum(x[row : row + 1], dim), got[row : row + 1])
    with pytest.raises(ValueError, match="dim: expected"):
        torch.ops.specstep.exact_sum(x, 4)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        exact("silu", torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        exact("mean", torch.ones(3, 0))

"""Packed linear layers: they mean what the reference says, and the bits of an output depend on nothing but its own row
and column."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.linear import reference
from specstep.kernels.linear.op import packed_embedding, packed_expert_linear, packed_linear
from specstep.kernels.linear.packing import pack
from specstep.kernels.native import load_library
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
# Rounding once to bfloat16 may land on the neighbour when the fp32 sums differ in their last bits.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a plain weight and a bias."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns * 31 + depth)
    shapes = ((rows, depth), (columns, depth), (columns,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight * max(depth, 1) ** -0.5, bias


def cancelling(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and a plain weight whose products cancel: what is left is how a sum was rounded, which bfloat16 shows, too."""
    x, weight, _ = operands(rows, columns, depth, dtype)
    half = depth // 2
    x[:, half : 2 * half], weight[:, half : 2 * half], weight[:, 2 * half :] = x[:, :half], -weight[:, :half], 0
    return x, weight


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(0, 70), columns=st.integers(0, 70), depth=st.integers(0, 90), dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
)  # fmt: skip
def test_matches_reference(rows: int, columns: int, depth: int, dtype: torch.dtype, biased: bool) -> None:
    x, weight, bias = operands(rows, columns, depth, dtype)
    packed, shift = pack(weight), bias if biased else None
    result = packed_linear(x, packed, shift, columns)
    assert result.dtype == dtype and result.shape == (rows, columns)
    torch.testing.assert_close(result, reference.packed_linear(x, packed, shift, columns), **TOLERANCES[dtype])
    plain = torch.nn.functional.linear(x.double(), weight.double(), None if shift is None else shift.double())
    torch.testing.assert_close(result, plain.to(dtype), **TOLERANCES[dtype])  # the reference unpacks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_zeros_give_the_bias(dtype: torch.dtype, sign: float) -> None:
    x, weight, bias = operands(3, 33, 20, dtype)
    zeros = torch.zeros_like(x) * sign
    assert torch.equal(packed_linear(zeros, pack(weight), bias, 33), bias.expand(3, -1))
    assert torch.equal(packed_linear(zeros, pack(weight), None, 33), torch.zeros(3, 33, dtype=dtype))
    zeros[2, 19] = 1  # not all of it
    expected = torch.nn.functional.linear(zeros.double(), weight.double(), bias.double())
    torch.testing.assert_close(packed_linear(zeros, pack(weight), bias, 33), expected.to(dtype), **TOLERANCES[dtype])


def test_float32_is_as_accurate_as_aten() -> None:
    x, weight, _ = operands(16, 65, 4099, torch.float32)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    error = (packed_linear(x, pack(weight), None, 65).double() - exact).abs().max()
    assert error <= 4 * (torch.nn.functional.linear(x, weight).double() - exact).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), ((1, 2), (17, 33), (48, 577), (33, 1536)))
def test_bits_of_a_row_do_not_depend_on_its_company(columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = cancelling(521, columns, depth, dtype)
    packed = pack(weight)
    whole = packed_linear(x, packed, None, columns)
    for rows in (*range(1, 65), 256, 257):
        assert torch.equal(packed_linear(x[:rows], packed, None, columns), whole[:rows]), rows
        assert torch.equal(packed_linear(x[521 - rows :], packed, None, columns), whole[521 - rows :]), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_orders_of_adding_give_other_bits(dtype: torch.dtype) -> None:
    """What the tests beside this one would see."""
    x, weight = cancelling(9, 48, 577, dtype)
    turned = packed_linear(x.flip(1).contiguous(), pack(weight.flip(1)), None, 48)
    assert not torch.equal(turned, packed_linear(x, pack(weight), None, 48))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_column_do_not_depend_on_its_place(dtype: torch.dtype) -> None:
    x, weight = cancelling(9, 80, 577, dtype)
    whole = packed_linear(x, pack(weight), None, 80)
    for first, last in ((0, 16), (16, 33), (48, 80)):
        own = packed_linear(x, pack(weight[first:last]), None, last - first)
        assert torch.equal(own, whole[:, first:last])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 7, 33, 300))
def test_bits_do_not_depend_on_the_threads(rows: int, dtype: torch.dtype) -> None:
    x, weight = cancelling(rows, 1000, 577, dtype)
    packed = pack(weight)
    alone = packed_linear(x, packed, None, 1000)
    torch.set_num_threads(2)
    assert torch.equal(packed_linear(x, packed, None, 1000), alone)


def test_weights_may_come_and_go_in_any_order() -> None:
    """Threads that wait fetch the weight that came next last time, whether it is still there or not."""
    generator, x = torch.Generator().manual_seed(4), torch.randn(3, 96)
    sizes = (512, 4096, 64, 1024, 2048)
    kept = [torch.randn(size, 96, generator=generator) for size in sizes]
    for number, place in enumerate(torch.randint(0, len(sizes), (60,), generator=generator).tolist()):
        weight = kept[place] if number % 2 else torch.randn(sizes[place], 96, generator=generator)
        got = packed_linear(x, pack(weight), None, len(weight))
        torch.testing.assert_close(got, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_strides(dtype: torch.dtype) -> None:
    x, weight, bias = operands(24, 65, 96, dtype)
    packed = pack(weight)
    wide = torch.randn(2, 5, 192).to(dtype)
    strided = (x[::2], x.t().contiguous().t(), wide[..., ::2], wide.transpose(0, 1)[..., :96])
    for value in (x.view(2, 3, 4, 96), x[0], x[:0], *strided):
        result = packed_linear(value, packed, bias, 65)
        assert result.shape == (*value.shape[:-1], 65) and result.is_contiguous()
        rows = value.reshape(-1, 96).contiguous()
        assert torch.equal(result.view(-1, 65), packed_linear(rows, packed, bias, 65))
        torch.testing.assert_close(result, reference.packed_linear(value, packed, bias, 65), **TOLERANCES[dtype])
    unaligned = torch.cat([packed.new_zeros(1), packed.flatten()])[1:].view_as(packed)
    assert torch.equal(packed_linear(x, unaligned, bias, 65), packed_linear(x, packed, bias, 65))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", (1, 2, 33))
def test_infinities_and_nan_stay_in_their_row(depth: int, dtype: torch.dtype) -> None:
    x, weight, _ = operands(5, 19, depth, dtype)
    packed = pack(weight.abs() + 1)
    whole = packed_linear(x, packed, None, 19)
    for bad, found in ((float("nan"), torch.isnan), (float("inf"), torch.isinf)):
        for place in (0, depth - 1):
            spoilt = x.clone()
            spoilt[2, place] = bad
            result = packed_linear(spoilt, packed, None, 19)
            assert found(result[2]).all()
            assert torch.equal(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


def test_bfloat16_is_rounded_once_to_nearest_even() -> None:
    """Sums 1 + 2^-8 and 1 + 3 * 2^-8 lie between two numbers each; NaN of any bits stays NaN, the largest overflow."""
    x = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8], [3.3895313892515355e38, 2e38], [1.0, float("nan")]]).bfloat16()
    result = packed_linear(x, pack(torch.ones(1, 2).bfloat16()), None, 1)[:, 0]
    assert result[:3].tolist() == [1.0, 1 + 2**-6, float("inf")] and result[3].isnan()
    all_ones = torch.full((1, 1), -1, dtype=torch.int16).view(torch.bfloat16)  # rounding up would carry into the sign
    assert packed_linear(all_ones, pack(torch.ones(1, 1).bfloat16()), None, 1).isnan().all()


@pytest.mark.parametrize(
    ("x", "packed", "bias", "columns"),
    [
        (torch.zeros(2, 5), torch.zeros(3, 4), None, 3),
        (torch.zeros(2, 5), torch.zeros(3, 4), None, 17),
        (torch.zeros(2, 4).bfloat16(), torch.zeros(3, 4), None, 3),
        (torch.zeros(2, 4).double(), torch.zeros(3, 4), None, 3),
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 3),
        (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3).bfloat16(), 3),
        (torch.tensor(1.0), torch.zeros(3, 4), None, 3),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int) -> None:
    with pytest.raises(ValueError, match=r"expected x \[..., K\], a weight packed from \[columns, K\]"):
        packed_linear(x, pack(packed), bias, columns)
    with pytest.raises(ValueError, match=r"expected a weight packed from \[columns, depth\]"):
        packed_embedding(pack(packed), torch.zeros(1), columns, 4)


@pytest.mark.parametrize("rows", (1, 8, 40))
def test_opcheck(rows: int) -> None:
    load_library()
    x, weight, bias = operands(rows, 17, 33, torch.bfloat16)
    packed, ops = pack(weight), torch.ops.specstep
    torch.library.opcheck(ops.packed_linear.default, (x, packed, bias, 17))
    torch.library.opcheck(ops.packed_linear.default, (x.view(1, rows, 33), packed, None, 17))
    torch.library.opcheck(ops.packed_embedding.default, (packed, torch.arange(17).view(1, 17), 17, 33))
    experts = pack(torch.randn(3, 17, 33).bfloat16())
    torch.library.opcheck(ops.packed_expert_linear.default, (x, experts, torch.arange(rows) % 3, 17))


def test_torch_compile() -> None:
    x, weight, bias = operands(8, 65, 96, torch.float32)
    packed = pack(weight)
    compiled = torch.compile(lambda value: torch.relu(packed_linear(value, packed, bias, 65)), fullgraph=True)
    assert torch.equal(compiled(x), torch.relu(packed_linear(x, packed, bias, 65)))


@settings(deadline=None, max_examples=60)
@given(
    pairs=st.integers(0, 90), count=st.integers(1, 9), columns=st.integers(1, 70), depth=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_experts_match_reference_and_each_row_alone(
    pairs: int, count: int, columns: int, depth: int, dtype: torch.dtype
) -> None:
    x, weight, _ = operands(pairs, columns * count, depth, dtype)
    weight = weight.view(count, columns, depth)
    experts = torch.randint(0, count, (pairs,), generator=torch.Generator().manual_seed(pairs))
    packed = pack(weight)
    result = packed_expert_linear(x, packed, experts, columns)
    expected = reference.packed_expert_linear(x, packed, experts, columns)
    torch.testing.assert_close(result, expected, **TOLERANCES[dtype])
    for pair in range(min(pairs, 5)):
        own = packed_linear(x[pair], pack(weight[experts[pair]]), None, columns)
        assert torch.equal(result[pair], own)


@pytest.mark.parametrize(
    ("x", "weight", "experts", "message"),
    [
        ((2, 5), (3, 4, 6), [0, 1], r"expected x \[P, K\], a weight packed from \[E, columns, K\]"),
        ((2, 5), (3, 4, 5), [0], "both float32 or both bfloat16"),
        ((2, 5), (4, 5), [0, 1], "both float32 or both bfloat16"),
        ((2, 5), (3, 4, 5), [0, 3], "expected experts below 3, got 3"),
        ((2, 5), (3, 4, 5), [0, -1], "expected experts below 3, got -1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    x: tuple[int, ...], weight: tuple[int, ...], experts: list[int], message: str
) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        packed_expert_linear(torch.zeros(x), pack(torch.zeros(weight)), torch.tensor(experts), 4)

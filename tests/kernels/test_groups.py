"""Weights in groups of 32: their layout, how they are quantised, and products with them, which depend on nothing but
their own row and column."""

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.linear import reference
from specstep.kernels.linear.groups import (
    GROUP_KINDS,
    Groups,
    pack_groups,
    unpack_groups,
)
from specstep.kernels.linear.op import packed_embedding, packed_expert_linear, packed_linear
from specstep.kernels.linear.quantize import quantize_int4, quantize_int8
from specstep.kernels.native import load_library
from torch import Tensor

CLOSE = {"rtol": 2**-7, "atol": 1e-3}  # fp32 sums that differ in their last bits may be rounded to neighbours


def groups_of(kind: str, *shape: int) -> Groups:
    """Any quants, scales, least values and factors of a weight [..., N, K], which are about 1 / sqrt(K)."""
    generator, own = torch.Generator().manual_seed(sum(shape)), GROUP_KINDS[kind]
    *rows, depth = shape
    steps, places = -(-depth // own.step), own.step // own.scaled
    quants = torch.randint(0, 2**own.bits, (*rows, steps, own.step), generator=generator, dtype=torch.uint8)
    scales, least = (torch.randn(*rows, steps, places, generator=generator) for _ in range(2))
    size = max(map(abs, own.values)) if own.values else 2**own.bits  # of what the scales multiply
    if own.groups > 1:
        factors = torch.rand(*rows, steps, 1 + own.least, generator=generator).half() / 40 / depth**0.5
        factors[..., 0] *= 16 / size
        scales, least = ((part * 40).clamp(-128, 127).to(torch.int8) for part in (scales, least))
        return Groups(kind, quants, scales, least if own.least else None, factors)
    return Groups(kind, quants, (scales * 16 / size / depth**0.5).half(), least.half() if own.least else None)


def x_of(rows: int, depth: int) -> Tensor:
    return torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)).bfloat16()


@settings(deadline=None, max_examples=60)
@given(kind=st.sampled_from(list(GROUP_KINDS)), columns=st.integers(0, 40), depth=st.integers(1, 100))
def test_unpack_is_the_inverse_of_pack(kind: str, columns: int, depth: int) -> None:
    for leading in ((), (3,)):
        groups = groups_of(kind, *leading, columns, depth)
        packed = pack_groups(groups)
        shape = (*leading, -(-columns // 16), -(-depth // GROUP_KINDS[kind].step), *GROUP_KINDS[kind].shape)
        assert packed.shape == shape and packed.is_contiguous()
        back = unpack_groups(packed, columns)
        assert back.kind == kind and torch.equal(back.values(depth), groups.values(depth))
        for own, other in zip(back[1:], groups[1:], strict=True):
            assert (own is None and other is None) or torch.equal(own, other)


@settings(deadline=None, max_examples=80)
@given(
    kind=st.sampled_from(list(GROUP_KINDS)), rows=st.integers(0, 40), columns=st.integers(0, 50),
    depth=st.integers(1, 140), biased=st.booleans(),
)  # fmt: skip
def test_matches_reference(kind: str, rows: int, columns: int, depth: int, biased: bool) -> None:
    x, packed = x_of(rows, depth), pack_groups(groups_of(kind, columns, depth))
    bias = torch.randn(columns).bfloat16() if biased else None
    result = packed_linear(x, packed, bias, columns)
    assert result.dtype == torch.bfloat16 and result.shape == (rows, columns)
    torch.testing.assert_close(result, reference.packed_linear(x, packed, bias, columns), **CLOSE)


def test_a_product_is_near_that_of_the_values() -> None:
    """What is lost is the rounding of x to 127 steps: a hundredth."""
    for kind in GROUP_KINDS:
        groups, x = groups_of(kind, 65, 577), x_of(20, 577)
        exact = x.float() @ groups.values(577).T
        error = (packed_linear(x, pack_groups(groups), None, 65).float() - exact).norm() / exact.norm()
        assert error < 0.012, kind


@pytest.mark.parametrize("kind", GROUP_KINDS)
@pytest.mark.parametrize(("columns", "depth"), ((1, 2), (17, 33), (48, 577), (33, 1536)))
def test_bits_of_a_row_do_not_depend_on_its_company(columns: int, depth: int, kind: str) -> None:
    x, packed = x_of(521, depth), pack_groups(groups_of(kind, columns, depth))
    whole = packed_linear(x, packed, None, columns)
    for rows in (*range(1, 65), 256, 257):
        assert torch.equal(packed_linear(x[:rows], packed, None, columns), whole[:rows]), rows
        assert torch.equal(packed_linear(x[521 - rows :], packed, None, columns), whole[521 - rows :]), rows


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_bits_depend_neither_on_threads_nor_on_other_columns(kind: str) -> None:
    groups, x = groups_of(kind, 1000, 577), x_of(33, 577)
    alone = packed_linear(x, pack_groups(groups), None, 1000)
    torch.set_num_threads(2)
    assert torch.equal(packed_linear(x, pack_groups(groups), None, 1000), alone)
    for first, last in ((0, 16), (16, 33), (48, 80)):
        part = groups.each(lambda part, first=first, last=last: part[first:last])  # type: ignore[misc]
        own = packed_linear(x, pack_groups(part), None, last - first)
        assert torch.equal(own, alone[:, first:last])


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_embedding_and_experts(kind: str) -> None:
    groups = groups_of(kind, 37, 70)
    packed, ids = pack_groups(groups), torch.randint(0, 37, (2, 3, 5))[:, ::2]
    assert torch.equal(packed_embedding(packed, ids, 37, 70), groups.values(70)[ids].bfloat16())
    of_experts, experts, x = pack_groups(groups_of(kind, 5, 37, 70)), torch.arange(30) % 5, x_of(30, 70)
    result = packed_expert_linear(x, of_experts, experts, 37)
    torch.testing.assert_close(result, reference.packed_expert_linear(x, of_experts, experts, 37), **CLOSE)
    for row in range(5):
        assert torch.equal(result[row], packed_linear(x[row], of_experts[row], None, 37))


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_infinities_and_nan_stay_in_their_row(bad: float) -> None:
    for kind in GROUP_KINDS:
        x, packed = x_of(5, 70), pack_groups(groups_of(kind, 19, 70))
        whole, spoilt = packed_linear(x, packed, None, 19), x.clone()
        spoilt[2, 69] = bad
        result = packed_linear(spoilt, packed, None, 19)
        assert not result[2].isfinite().any() and torch.equal(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_the_greatest_sums_of_a_group(kind: str) -> None:
    """Instruction sets without a product of four bytes sum a group's in halves: these hold the most that there is."""
    own = GROUP_KINDS[kind]
    most, depth = 2**own.bits - 1, 3 * own.step
    if own.values:
        most = own.values.index(max(own.values))
    for quant, sign in ((most, 1), (most, -1), (0, 1), (0, -1)):
        quants = torch.full((16, 3, own.step), quant, dtype=torch.uint8)
        ones = torch.ones(16, 3, own.step // own.scaled, dtype=torch.int8 if own.groups > 1 else torch.float16)
        factors = torch.ones(16, 3, 1 + own.least).half() if own.groups > 1 else None
        groups = Groups(kind, quants, ones, ones if own.least else None, factors)
        for rows in (1, 3, 8, 17):
            x = torch.full((rows, depth), float(sign)).bfloat16()
            result = packed_linear(x, pack_groups(groups), None, 16)
            assert torch.equal(result, (x.float() @ groups.values(depth).T).bfloat16())


def test_tiny_and_zero_groups() -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    weight[:, :32], weight[:, 32:64] = 0, weight[:, 32:64] * 1e-9  # too small for a scale of float16
    for quantize in (quantize_int8, quantize_int4):
        groups = quantize(weight)
        assert not groups.values(96)[:, :64].any() and groups.values(96)[:, 64:].any()
        x = torch.cat([x_of(3, 96)[:, :64] * 1e-38, x_of(3, 96)[:, 64:]], -1)
        torch.testing.assert_close(
            packed_linear(x, pack_groups(groups), None, 16).float(),
            x.float() @ groups.values(96).T,
            rtol=0.05,
            atol=0.05,
        )


@pytest.mark.parametrize(("quantize", "name", "share"), ((quantize_int8, "Q8_0", 1.001), (quantize_int4, "Q4_0", 0.95)))
def test_no_worse_than_ggml(quantize, name: str, share: float) -> None:  # type: ignore[no-untyped-def]
    """The squared error beside that of GGUF's own quantisation of the same type."""
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)) * 0.02
    kind = gguf.GGMLQuantizationType[name]
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
    ours = quantize(weight).values(576)
    assert (ours - weight).square().sum() <= share * (theirs - weight).square().sum()


def test_depths_that_are_no_multiple_of_a_group_are_padded() -> None:
    weight = torch.randn(19, 45)
    groups = quantize_int8(weight)
    assert groups.quants.shape == (19, 2, 32)
    torch.testing.assert_close(groups.values(45), weight, rtol=0, atol=0.02)


def test_what_does_not_fit_is_refused() -> None:
    packed, x = pack_groups(groups_of("int8", 19, 70)), x_of(3, 70)
    others = (
        (x.float(), packed, 19), (x, packed, 33), (x[:, :64], packed, 19), (x, packed[..., :-1].contiguous(), 19),
        (x, packed.view(torch.int8), 19),
    )  # fmt: skip
    for given_x, given_packed, columns in others:
        with pytest.raises(ValueError, match=r"a weight in groups: x and bias bfloat16"):
            packed_linear(given_x, given_packed, None, columns)


def test_opcheck() -> None:
    load_library()
    ops, x = torch.ops.specstep, x_of(4, 70)
    for kind in GROUP_KINDS:
        packed, experts = pack_groups(groups_of(kind, 19, 70)), pack_groups(groups_of(kind, 3, 19, 70))
        torch.library.opcheck(ops.packed_linear.default, (x, packed, None, 19))
        torch.library.opcheck(ops.packed_embedding.default, (packed, torch.arange(19).view(1, 19), 19, 70))
        torch.library.opcheck(ops.packed_expert_linear.default, (x, experts, torch.arange(4) % 3, 19))

"""Linear layers over float8 weights against the product of what was rounded."""

import pytest
import torch
from specstep.kernels.fp8_linear.op import fp8_linear
from specstep.kernels.fp8_linear.reference import FLOAT8, GREATEST, quantize


def test_rounding_is_within_the_format():
    """Three bits behind the leading one: at most a sixteenth of a number, or of the least normal one."""
    x = torch.randn(40, 64) * torch.logspace(-4, 4, 40)[:, None]
    rounded, scale = quantize(x)
    assert rounded.dtype == FLOAT8 and scale.shape == (40, 1)
    most = torch.maximum(x.abs() / 16, scale * 2.0**-9)
    assert ((rounded.float() * scale - x).abs() <= most * 1.001).all()
    assert torch.equal(rounded.float().abs().amax(1), torch.full((40,), GREATEST))


def test_zeros_stay_zeros():
    rounded, scale = quantize(torch.zeros(2, 16))
    assert not rounded.float().any() and (scale > 0).all()


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (1, 1), (33,)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_product_of_what_was_rounded(shape, bias):
    torch.manual_seed(0)
    x, plain = torch.randn(*shape, 48).bfloat16(), torch.randn(32, 48)
    weight, scale = quantize(plain)
    given = torch.randn(32).bfloat16() if bias else None
    rows, scales = quantize(x)
    expected = (rows.float() * scales) @ (weight.float() * scale).T
    expected = expected if given is None else expected + given.float()
    got = fp8_linear(x, weight, scale, given)
    assert got.dtype == torch.bfloat16 and got.shape == (*shape, 32)
    assert torch.allclose(got.float(), expected, rtol=2**-7, atol=0.05)
    assert not torch.allclose(fp8_linear(x, weight.flip(0), scale, given).float(), expected, rtol=2**-7, atol=0.05)


def test_a_token_does_not_depend_on_its_neighbours():
    x, (weight, scale) = torch.randn(9, 48).bfloat16(), quantize(torch.randn(32, 48))
    whole = fp8_linear(x, weight, scale)
    x[1:] *= 1000
    assert torch.allclose(fp8_linear(x, weight, scale)[0].float(), whole[0].float(), rtol=2**-7, atol=1e-3)


def test_opcheck():
    weight, scale = quantize(torch.randn(32, 48))
    given = torch.randn(3, 48).bfloat16(), weight, scale
    torch.library.opcheck(fp8_linear, given, test_utils=("test_faketensor", "test_autograd_registration"))


def test_refusals_name_expected_and_got():
    weight, scale = quantize(torch.randn(32, 48))
    x = torch.randn(3, 48).bfloat16()
    with pytest.raises(ValueError, match=r"weight: expected torch\.float8_e4m3fn, got torch\.bfloat16"):
        fp8_linear(x, weight.bfloat16(), scale)
    with pytest.raises(ValueError, match=r"weight: expected multiples of 16, got \[31, 48\]"):
        fp8_linear(x, weight[:31], scale[:31])
    with pytest.raises(ValueError, match=r"x, scale: expected \[..., 48\] and \[32, 1\], got \[3, 32\] and \[32, 1\]"):
        fp8_linear(x[:, :32], weight, scale)

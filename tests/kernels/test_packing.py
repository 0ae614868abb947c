"""The layout of packed weights, there and back, and the embedding that reads it."""

import pytest
import torch
from specstep.kernels.linear import reference
from specstep.kernels.linear.op import packed_embedding
from specstep.kernels.linear.packing import pack, unpack

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((1, 1), (16, 2), (17, 33), (3, 0), (0, 3), (2, 33, 5)))
def test_unpack_is_the_inverse_of_pack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    packed = pack(weight)
    assert packed.is_contiguous() and packed.data_ptr() % 4 == 0
    assert torch.equal(unpack(packed, *shape[-2:]), weight)


def test_layout_of_a_packed_weight() -> None:
    """Step k of output n is at panel n / 16, place n % 16; bfloat16 keeps pairs along K together."""
    weight = torch.arange(17.0 * 3).view(17, 3)
    wide, narrow = pack(weight), pack(weight.bfloat16())
    assert wide.shape == (2, 3, 16) and narrow.shape == (2, 2, 16, 2)
    assert wide[1, 2, 0] == weight[16, 2] and wide[0, 1, 5] == weight[5, 1]
    assert narrow[1, 1, 0].tolist() == [50.0, 0.0] and narrow[0, 0, 5].tolist() == weight[5, :2].tolist()
    assert not wide[1, :, 1:].any() and not narrow[1, :, 1:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_takes_rows_of_a_packed_weight(dtype: torch.dtype) -> None:
    for columns, depth in ((1, 1), (37, 33), (64, 576)):
        weight = torch.randn(columns, depth).to(dtype)
        for ids in (torch.arange(columns), torch.randint(0, columns, (2, 3, 5))[:, ::2], torch.zeros(0, 2).long()):
            result = packed_embedding(pack(weight), ids, columns, depth)
            assert torch.equal(result, torch.nn.functional.embedding(ids, weight))
            assert torch.equal(result, reference.packed_embedding(pack(weight), ids, columns, depth))


@pytest.mark.parametrize("wrong", (-1, 37, 47, 2**40))
def test_ids_that_are_not_there_are_refused(wrong: int) -> None:
    """Also those that lie in the padding of the last panel."""
    with pytest.raises(IndexError, match=f"expected ids below 37, got {wrong}"):
        packed_embedding(pack(torch.zeros(37, 4)), torch.tensor([[3, wrong]]), 37, 4)


def test_another_dtype_is_not_packed() -> None:
    with pytest.raises(KeyError):
        pack(torch.zeros(3, 4).half())

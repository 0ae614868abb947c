"""What slices of weights become: the groups of the whole weight, cut."""

import pytest
import torch
from specstep.compile.config import make_config
from specstep.compile.precision import WeightForm, choose_precision
from specstep.compile.ranks.slices import OutputBlock, Slices
from specstep.errors import BuildError
from specstep.kernels.fp8_linear.reference import quantize
from specstep.kernels.linear.groups import GROUP_KINDS, pack_groups, unpack_groups
from specstep.kernels.linear.packing import unpack
from specstep.kernels.linear.quantize import quantize_int4, quantize_int8


def quantised(kind):
    """What a build makes of a whole weight."""
    quantize = {"int8": quantize_int8, "int4": quantize_int4}[kind]
    return lambda weight: WeightForm(kind, lambda given: pack_groups(quantize(given)))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_have_the_values_of_the_whole(kind, parts):
    weight, slices, form = torch.randn(20, 256).bfloat16(), Slices("ranks"), quantised(kind)
    cut, precision = slices.cut(weight, parts, "it"), slices.precision(form)
    made = [precision(part).make(part) for part in cut]
    got = torch.cat([unpack(packed, 20, 256 // parts) for packed in made], 1)
    assert torch.equal(got, unpack(form(weight).make(weight), 20, 256))


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_parts_have_the_groups_of_a_file(kind):
    steps = 1024 // GROUP_KINDS[kind].step
    held = torch.randint(0, 256, (2, steps, *GROUP_KINDS[kind].shape), dtype=torch.uint8)
    slices, weight = Slices("ranks"), torch.randn(20, 1024).bfloat16()
    cut, precision = slices.cut(weight, 2, "it"), slices.precision(lambda _: WeightForm(kind, lambda given: held))
    whole = unpack_groups(held, 20)
    for at, part in enumerate(cut):
        form = precision(part)
        own = unpack_groups(form.make(part), 20)
        assert form.kind == own.kind == kind
        for mine, theirs in zip(own[1:], whole[1:], strict=True):
            if theirs is not None:
                taken = theirs[:, at * steps // 2 : (at + 1) * steps // 2]
                assert torch.equal(mine.view(torch.uint8), taken.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "library", "dense"),
    [("bfloat16", True, False), ("float32", True, False), ("float16", True, True), ("bfloat16", False, True)],
)
def test_parts_that_nothing_packs_are_dense(dtype, library, dense, monkeypatch):
    """A program takes what it is lent as dense: one with strides of its own would read past its end."""
    monkeypatch.setattr("specstep.compile.ranks.slices.has_library", lambda: library)
    weight, slices = torch.randn(4, 8).to(getattr(torch, dtype)), Slices("ranks")
    cut, seen = slices.cut(weight, 2, "it"), []
    assert [part.is_contiguous() for part in cut] == [dense] * 2
    assert torch.equal(torch.cat(cut, 1), weight)
    precision = slices.precision(lambda given: seen.append(given) or WeightForm("plain", torch.clone))
    for part in cut:
        precision(part)
    assert all(each is weight for each in seen) and len(seen) == 2


def test_a_slice_that_is_too_narrow_for_eight_bits_stays_as_it_is():
    """A GPU's products take multiples of 16: so many rows and columns have all slices of a weight, or none."""
    config = make_config({"device": "cuda", "compute_capability": ("9.0",), "weights": "fp8"})
    slices, form = Slices("ranks"), choose_precision(config, [], 320, ())
    narrow, wide = (slices.cut(torch.randn(48, size).bfloat16(), 2, "it") for size in (48, 64))
    rows = slices.rows_of(torch.randn(320, 48).bfloat16(), [OutputBlock(320, 2, 0)])  # of the head
    precision = slices.precision(form)
    assert form(narrow[0].new_empty(48, 48)).kind == "fp8"
    assert {precision(part).kind for part in (*narrow, rows)} == {"bfloat16"}
    assert {precision(part).kind for part in wide} == {"fp8"}
    assert torch.equal(precision(wide[1]).make(wide[1]).float(), quantize(wide[1])[0].float())


def test_a_part_that_ends_in_a_group_is_refused():
    slices = Slices("ranks")
    part, _ = slices.cut(torch.randn(16, 96).bfloat16(), 2, "it")
    form = slices.precision(quantised("int4"))(part)
    with pytest.raises(BuildError, match=r"ranks: expected parts of a multiple of 32 inputs.*int4, got 48"):
        form.make(part)


def test_blocks_of_outputs_are_cut_each():
    weight, slices = torch.arange(24.0).view(12, 2), Slices("ranks")
    got = [slices.rows_of(weight, [OutputBlock(6, 3, part)] * 2)[:, 0].tolist() for part in range(3)]
    assert got == [[0, 2, 12, 14], [4, 6, 16, 18], [8, 10, 20, 22]]

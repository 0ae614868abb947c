"""What each weight becomes: as it is, quantised here, or in the groups of the quantised file that it is from."""

import functools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.fp8_linear.reference import MULTIPLE, quantize
from ..kernels.linear.groups import Groups, pack_groups
from ..kernels.linear.packing import pack
from ..kernels.linear.quantize import quantize_int4, quantize_int8
from .config import EngineConfig
from .heap import give_back
from .kept_groups import ROWS, KeptGroups
from .on_disk import OnDisk
from .source import kept_weights


class WeightForm(NamedTuple):
    """What a weight becomes. kind: its name; weights of one kind can be packed as one, output after output. make: packs
    a weight [..., N, K] of that kind."""

    kind: str
    make: Callable[[Tensor], Tensor]


GIVEN_BACK = 2**26  # bytes of weights after which the heap is trimmed: that takes a millisecond or more
FP8, FP8_SCALES = "fp8", "fp8 scales"  # kinds
Precision = Callable[[Tensor], WeightForm]  # from a weight [..., N, K] to what it becomes


def choose_precision(
    config: EngineConfig, files: Sequence[Path], vocab_size: int, drafting: Collection[int]
) -> Precision:
    """What `config.weights` asks for; float32 weights stay as they are.

    files: quantised ones that models were loaded from, or directories. vocab_size: a head and an embedding of so many
    tokens have eight bits where others have four. drafting: addresses of weights that only the drafter reads. No text
    depends on those: where their file does not say how they are quantised, "auto" quantises them as "int4" does.
    """
    if config.weights == "fp8":
        return lambda weight: plain(weight) if weight.shape[-2] == vocab_size else _fp8(weight)
    if config.device != "cpu" or config.dtype != "bfloat16" or config.weights == "bfloat16":
        return plain
    if config.weights == "int8":
        return _int8

    def four_bits(weight: Tensor) -> WeightForm:
        return _int8(weight) if weight.shape[-2] == vocab_size else _int4(weight)

    if config.weights == "int4":
        return four_bits
    held = functools.cache(lambda file: KeptGroups(kept_weights(file)))  # read when the first weight is packed

    def auto(weight: Tensor) -> WeightForm:
        found = _as_in_files([held(file) for file in files], weight)
        return found or (four_bits if weight.data_ptr() in drafting else plain)(weight)

    return auto


def kept_on(disk: OnDisk, precision: Precision) -> Precision:
    """The same precision, whose packed weights lie on the disk."""
    since = 0  # bytes of weights packed since the heap's memory was given back

    def form(weight: Tensor) -> WeightForm:
        kind, make = precision(weight)
        disk.release_all()  # it may have looked at all values

        def make_and_keep(weight: Tensor) -> Tensor:
            nonlocal since
            packed = disk.keep(make(weight))
            disk.release_all()  # what it was made of may have been several weights
            since += weight.nbytes
            if since > GIVEN_BACK:
                give_back()
                since = 0
            return packed

        return WeightForm(kind, make_and_keep)

    return form


def plain(weight: Tensor) -> WeightForm:
    """Keep the dtype."""
    return WeightForm(str(weight.dtype).removeprefix("torch."), pack)


def _int8(weight: Tensor) -> WeightForm:
    return _quantized(weight, "int8", quantize_int8)


def _int4(weight: Tensor) -> WeightForm:
    return _quantized(weight, "int4", quantize_int4)


def _fp8(weight: Tensor) -> WeightForm:
    if weight.dim() != 2 or weight.dtype != torch.bfloat16 or any(size % MULTIPLE for size in weight.shape):
        return plain(weight)
    return WeightForm(FP8, lambda weight: quantize(weight)[0])


def fp8_scales(_: Tensor) -> WeightForm:
    """The scales of a weight that becomes FP8."""
    return WeightForm(FP8_SCALES, lambda weight: quantize(weight)[1])


def _quantized(weight: Tensor, kind: str, quantize: Callable[[Tensor], Groups]) -> WeightForm:
    if weight.dtype != torch.bfloat16:
        return plain(weight)
    return WeightForm(kind, _by_rows(lambda rows: pack_groups(quantize(rows))))


def _as_in_files(files: list[KeptGroups], weight: Tensor) -> WeightForm | None:
    for file in files:
        if kind := file.kind(weight):
            return WeightForm(kind, _by_rows(partial(_pack_kept, file, kind)))
    return None


def _pack_kept(file: KeptGroups, kind: str, rows: Tensor) -> Tensor:
    return pack_groups(file.groups(rows, kind))


def _by_rows(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Pack a weight [..., N, K] some rows after the others, which takes less memory than all at once."""

    def make_all(weight: Tensor) -> Tensor:
        if weight.dim() > 2 and len(weight):
            return torch.stack([make_all(each) for each in weight])
        return torch.cat([make(rows) for rows in weight.split(ROWS)])

    return make_all

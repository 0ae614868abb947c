"""Tensors in GPU memory, without torch."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .driver import Driver

STAND_INS = {"bfloat16": "uint16"}  # numpy has no bfloat16: its bits


class DeviceArray:
    """A tensor in device memory: rows of it can be assigned from the host, and all of it read."""

    def __init__(self, device: Driver, stream: int, shape: Sequence[int], dtype: str):
        """dtype: as torch names it. New memory is zero; it is given back with the array."""
        self.device, self.stream, self.shape, self.kind = device, stream, tuple(shape), dtype
        self.dtype = np.dtype(STAND_INS.get(dtype, dtype))
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.address = device.allocate(self.shape[0] * self.row_bytes)
        weakref.finalize(self, device.free, self.address).atexit = False

    def row(self, row: int) -> int:
        """Address of a row."""
        return self.address + row * self.row_bytes

    def __setitem__(self, key: Any, value: Any) -> None:
        """`array[row] = value` and `array[row, :count] = value`, of the array's dtype; bfloat16 as its bits."""
        row, part = key if isinstance(key, tuple) else (key, slice(None))
        shape = self.shape[1:] if part == slice(None) else (part.stop, *self.shape[2:])
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(value, self.dtype), shape))
        self.device.upload(self.row(row), data, self.stream)

    def clear(self, row: int) -> None:
        """Fill a row with zeros."""
        self.device.zero(self.row(row), self.row_bytes, self.stream)

    def bits(self, rows: int) -> NDArray[Any]:
        """A copy of the first rows on the host, when the device is done with the work so far; bfloat16 as its bits."""
        data = np.empty((rows, *self.shape[1:]), self.dtype)
        self.device.download(data, self.address, self.stream)
        return data

    def read(self, rows: int) -> NDArray[Any]:
        """A copy of the first rows on the host; bfloat16 as float32."""
        data = self.bits(rows)
        return (data.astype(np.uint32) << 16).view(np.float32) if self.kind == "bfloat16" else data

    def write(self, values: NDArray[Any]) -> None:
        """Fill the first part of every dimension; bfloat16 from float32 values that it can hold."""
        data = self.bits(len(values))
        place = tuple(slice(size) for size in values.shape)
        data[place] = (values.view(np.uint32) >> 16).astype(np.uint16) if self.kind == "bfloat16" else values
        for row, part in enumerate(data):
            self[row] = part

    def tolist(self) -> Any:
        """Nested lists, as of a numpy array."""
        return self.read(self.shape[0]).tolist()

"""A GGUF file is parsed once for all who read it while an engine is built: transformers alone does so three times."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np


class PlainReader(gguf.GGUFReader):
    """gguf's reader over a plain array: slices of np.memmap, one for each word of a vocabulary, take three times as
    long."""

    @property
    def data(self) -> "np.typing.NDArray[np.uint8]":
        return self._data

    @data.setter
    def data(self, mapped: "np.typing.NDArray[np.uint8]") -> None:
        self._data = mapped.view(np.ndarray)


@contextlib.contextmanager
def shared_reads() -> Iterator[None]:
    """Within it `gguf.GGUFReader(path)` hands out one reader of a file again and again, and
    `gguf.get_tensor_name_map` one map, which transformers asks for at every module of a model. Nothing is kept when the
    block ends."""
    kept = gguf.GGUFReader, gguf.get_tensor_name_map
    read = functools.cache(PlainReader)

    def reader(path: Any) -> PlainReader:
        return read(os.path.realpath(path))

    gguf.GGUFReader, gguf.get_tensor_name_map = reader, functools.cache(kept[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = kept

"""A GGUF file, or the parts of one, as a table of metadata and a table of tensors over the mapped file.

Format: github.com/ggml-org/ggml, docs/gguf.md. `gguf.GGUFReader` makes an array for each word of a vocabulary: 262k
words take it 15 seconds, and one here.
"""

import functools
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value

from ...errors import BuildError

VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, unless the file says otherwise
SCALARS = {
    Value.UINT8: "B", Value.INT8: "b", Value.UINT16: "H", Value.INT16: "h", Value.UINT32: "I", Value.INT32: "i",
    Value.FLOAT32: "f", Value.BOOL: "?", Value.UINT64: "Q", Value.INT64: "q", Value.FLOAT64: "d",
}  # fmt: skip
PLAIN = {Type.F32: np.float32, Type.F16: np.float16}
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
AGAIN = "copy or download it again"


class GgufTensor(NamedTuple):
    """A tensor of the file. shape: row after row, as torch has it. data: the elements of F32 and F16, else the
    bytes of each row [..., bytes]. factors: float32 [N], what the values of each row are multiplied by; None for 1."""

    name: str
    shape: tuple[int, ...]
    kind: Type
    data: "np.typing.NDArray[Any]"
    factors: "np.typing.NDArray[np.float32] | None" = None


class GgufFile(NamedTuple):
    """All parts of a model: the metadata of the first, the tensors of all, by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    mapped: tuple[mmap.mmap, ...] = ()

    def release(self) -> None:
        """Take what was read of the file out of this process's memory, until it is read again."""
        for part in self.mapped:
            if hasattr(part, "madvise"):
                part.madvise(mmap.MADV_DONTNEED)


def read_gguf(path: Path) -> GgufFile:
    """Open a file; of a split one, any part stands for all. Raises BuildError for what is damaged, of another byte
    order, or of a version or type that is not known."""
    found = _read_whole(path)
    return found._replace(tensors=_with_factors(found))


def _read_whole(path: Path) -> GgufFile:
    """The same, with tensors as they are stored."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if count < 2:
        return first
    parts = [_read_part(part) for part in _part_paths(path, count)]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        got = part.metadata.get("split.no"), part.metadata.get("split.count")
        if got != (number, count):
            raise BuildError(f"model: {part.path}: split.no, split.count: expected {(number, count)}, got {got}")
        if twice := tensors.keys() & part.tensors.keys():
            raise BuildError(f"model: {part.path}: expected other tensors than earlier parts, got {min(twice)} again")
        tensors.update(part.tensors)
    if (expected := parts[0].metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise BuildError(f"model: {path}: expected {expected} tensors in {count} parts, got {len(tensors)}; {AGAIN}")
    return GgufFile(parts[0].path, parts[0].metadata, tensors, sum((part.mapped for part in parts), ()))


def _with_factors(file: GgufFile) -> dict[str, GgufTensor]:
    """The tensors, those of NVFP4 with their factors: the converter stores one of a matrix, or of each expert, as a
    tensor of its own, and one of its inputs, which are not quantised here. Raises BuildError."""
    found = dict(file.tensors)
    for tensor in file.tensors.values():
        if tensor.kind != Type.NVFP4:
            continue
        stem = tensor.name.removesuffix(".weight")
        found.pop(f"{stem}.input_scale", None)
        scale = found.pop(f"{stem}.scale", None)
        if scale is None:
            continue
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        experts = tensor.shape[0] if len(tensor.shape) > 2 else 1
        if scale.kind != Type.F32 or scale.data.size not in (1, experts):
            raise BuildError(
                f"model: {file.path}: {scale.name}: expected {experts} numbers of F32, got {scale.kind.name} "
                f"{scale.shape}"
            )
        factors = np.repeat(scale.data.reshape(-1), rows // scale.data.size)
        found[tensor.name] = tensor._replace(factors=factors)
    return found


def known_types() -> list[str]:
    """The types of tensors that can be widened, by name."""
    return [kind.name for kind in Type if _is_known(kind)]


def _part_paths(path: Path, count: int) -> list[Path]:
    found = PART.search(path.name)
    if not found or int(found[2]) != count:
        raise BuildError(f"model: {path}: expected a name that ends in -00001-of-{count:05}.gguf, got {path.name}")
    paths = [
        path.with_name(f"{path.name[: found.start()]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
    ]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise BuildError(f"model: {path}: expected {count} parts in its folder, got none named {', '.join(missing)}")
    return paths


def _read_part(path: Path) -> GgufFile:
    with path.open("rb") as file:
        mapped = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)] if path.stat().st_size else []
    reader = _Reader(path, memoryview(mapped[0] if mapped else b""))
    tensor_count, key_count = reader.header()
    try:
        metadata = reader.metadata(key_count)
        tensors = reader.tensors(tensor_count, metadata.get("general.alignment", ALIGNMENT))
    except (struct.error, UnicodeDecodeError, IndexError, ValueError, OverflowError) as error:
        raise BuildError(f"model: {path}: expected a whole GGUF file, got a damaged one ({error}); {AGAIN}") from None
    return GgufFile(path, metadata, tensors, tuple(mapped))


class _Reader:
    """Reads one file from its start."""

    def __init__(self, path: Path, mapped: memoryview):
        self.path, self.mapped, self.at = path, mapped, 0

    def header(self) -> tuple[int, int]:
        """The numbers of tensors and of keys."""
        magic, version = bytes(self.mapped[:4]), int.from_bytes(self.mapped[4:8], "little")
        if magic != b"GGUF" or len(self.mapped) < 24:
            raise BuildError(f"model: {self.path}: expected a GGUF file, got one that begins with {magic!r}; {AGAIN}")
        if version.to_bytes(4, "big")[:2] != b"\0\0":
            raise BuildError(f"model: {self.path}: expected a little-endian GGUF file, got a big-endian one")
        if version not in VERSIONS:
            known = " or ".join(map(str, VERSIONS))
            raise BuildError(f"model: {self.path}: GGUF version: expected {known}, got {version}; convert it again")
        self.at = 24
        counts: tuple[int, int] = struct.unpack_from("<QQ", self.mapped, 8)
        return counts

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._text()
            if name in found:
                raise ValueError(f"{name} twice")
            found[name] = self._value(Value(self._scalar("I")))
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        heads = []
        for _ in range(count):
            name = self._text()
            turned = self._array("Q", self._scalar("I"))  # the fastest dimension first
            heads.append((name, tuple(reversed(turned)), self._kind(self._scalar("I"), name), self._scalar("Q")))
        start = -(-self.at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in heads}
        if len(tensors) != count:
            raise ValueError("a tensor twice")
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: Type, start: int) -> GgufTensor:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        *rows, width = shape or (1,)
        if width % block:
            raise ValueError(f"{name} with rows of {width} in blocks of {block}")
        count = int(np.prod(rows, dtype=np.int64)) * (width // block) * size
        if start + count > len(self.mapped):
            raise ValueError(f"{len(self.mapped)} bytes, {name} ends at {start + count}")
        held = np.frombuffer(self.mapped, PLAIN.get(kind, np.uint8), count // (size if kind in PLAIN else 1), start)
        return GgufTensor(name, shape, kind, held.reshape(*rows, width if kind in PLAIN else width // block * size))

    def _kind(self, number: int, name: str) -> Type:
        known = number in Type._value2member_map_
        if not known or not _is_known(Type(number)):
            odd = f"{Type(number).name} in {name}" if known else f"type {number} in {name}"
            raise BuildError(f"model: {self.path}: expected tensors of {', '.join(known_types())}, got {odd}")
        return Type(number)

    def _value(self, kind: Value) -> Any:
        if kind == Value.STRING:
            return self._text()
        if kind != Value.ARRAY:
            return self._scalar(SCALARS[kind])
        inner, count = Value(self._scalar("I")), self._scalar("Q")
        if inner in SCALARS:
            return self._array(SCALARS[inner], count)
        return [self._value(inner) for _ in range(count)]

    def _scalar(self, code: str) -> Any:
        return self._array(code, 1)[0]

    def _array(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize(f"<{code}") * count
        if self.at + size > len(self.mapped):
            raise ValueError(f"it ends at byte {len(self.mapped)}")
        values = list(struct.unpack_from(f"<{count}{code}", self.mapped, self.at))
        self.at += size
        return values

    def _text(self) -> str:
        (length,) = struct.unpack_from("<Q", self.mapped, self.at)
        start = self.at + 8
        if start + length > len(self.mapped):
            raise ValueError(f"it ends at byte {len(self.mapped)}")
        self.at = start + length
        return str(self.mapped[start : self.at], "utf-8")


@functools.cache
def _is_known(kind: Type) -> bool:
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True

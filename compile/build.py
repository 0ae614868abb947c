"""The whole pipeline on one page: load, assemble, check, export, compile, write."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..runtime.aoti import machine
from ..runtime.engine_file import ProgramSpec
from ..runtime.errors import BuildError
from .assemble import assemble
from .config import EngineConfig
from .export import export_program
from .faithful import check_faithful
from .inductor import compile_programs, constant_names, copy_libraries
from .source import load_source, model_summary
from .stages import describe_tree, stage_shares
from .writer import engine_directory, write_manifest, write_tokenizer, write_weights

Report = Callable[[str], None]


def build(model: str, output: str | Path, *, report: Report = lambda message: None, **options: Any) -> Path:
    """Build an engine directory from a model -> its path. Options: the fields of `EngineConfig`. Raises BuildError.

    `report` is called with one line per stage.
    """
    started = time.perf_counter()
    config = make_config(options)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise BuildError("device: expected cpu, got cuda on a machine without a usable NVIDIA GPU")
    with engine_directory(Path(output)) as directory:
        report(f"loading {model}")
        source = load_source(model, config.dtype, config.device)
        graphs = assemble(source, config)
        report("comparing the traced model with transformers")
        check_faithful(source, graphs)

        exported, programs = {}, {}
        for name, program in (("prefill", graphs.prefill), ("step", graphs.step)):
            report(f"tracing the {name}")
            exported[name] = export_program(program, graphs.spec)
        report(f"compiling {' and '.join(f'{name} ({len(e.graph.nodes)} nodes)' for name, e in exported.items())}")
        compile_programs(exported, directory, config.device)

        report("writing weights")
        if config.device == "cpu":
            copy_libraries(directory)
        wanted = {name: constant_names(directory / f"{name}.pt2", config.device) for name in exported}
        constants = write_weights(directory, {name: (exported[name], wanted[name]) for name in exported})
        for name in exported:
            spec: ProgramSpec = getattr(graphs.spec, name)
            programs[name] = dataclasses.replace(spec, file=f"{name}.pt2", constants=constants[name])
        write_tokenizer(directory, source)
        special = source.tokenizer.special_tokens_map if source.tokenizer else {}
        about = {
            "model": model_summary(source),
            "tree": describe_tree(graphs.step),
            "stages": stage_shares(exported["step"]),
            "versions": {"torch": torch.__version__} | _versions(),
            "built_on": {key: value for key, value in machine().items() if key != "instructions"},
            "build_s": round(time.perf_counter() - started, 1),
            "special_tokens": {name: token for name, token in special.items() if isinstance(token, str)},
        }
        write_manifest(directory, graphs.spec, programs, about)
    report(f"engine written to {output} in {time.perf_counter() - started:.0f} s")
    return Path(output)


def make_config(options: dict[str, Any]) -> EngineConfig:
    """Options -> a validated config. Raises BuildError for an unknown name or a value out of range."""
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise BuildError(f"options: expected some of {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return EngineConfig(**options)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("specstep", "transformers")}

"""The whole pipeline on one page: load, assemble, check, lower, write."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

import torch

from ..backends import BACKENDS
from ..graphs.drafters.drafter import Drafter
from ..progress import OnProgress, silent
from ..runtime.inductor.aoti import machine
from .assemble import Assembled, assemble
from .checkpoint import note_tokens
from .config import BuildOptions, EngineConfig, given_scorer, make_config
from .conversations import special_tokens, tools_of
from .drafters.validate import check_traceable
from .drafters.vocabulary import said_in_common
from .faithful import check_faithful
from .gguf.blocks import held_types
from .heap import give_back
from .hub import download
from .locate import gguf_file
from .lowered import Lowered
from .on_disk import OnDisk
from .ranks.share import share
from .settle_readings import settle_readings
from .source import Source, load_source, model_summary, quantized_file, widened_tensors
from .stage_times import StageTimes
from .stages import describe_tree
from .try_drafts import try_drafts
from .tuned import with_tuned
from .writer import engine_directory, write_manifest, write_tokenizer


def build(model: str, output: str | Path, *, progress: OnProgress = silent, **options: Unpack[BuildOptions]) -> Path:
    """Compile a model and a drafter into an engine directory, which `load` opens.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or "smollm2-135m".
        output: the directory to write. An engine that stands there is replaced when the new one is complete.
        progress: called with one line per stage.
        options: drafter, tree, dtype, backend and so on, see `EngineConfig`. `drafter` may be a `Scorer`, whose
            tensors move to the engine's device, and its parameters to the engine's dtype.

    Returns:
        The path of the engine directory.

    Raises:
        BuildError: the model, the drafter or an option is one that no engine can be built from.
    """
    started = time.perf_counter()
    progress = times = StageTimes(progress)
    config = make_config(options)
    compiler = BACKENDS[config.backend].load_compiler()
    if config.gpu is not None:
        compiler.load_described_gpu()  # before a large model is loaded
    with engine_directory(Path(output)) as directory, OnDisk() as disk:
        download(filter(None, [model, config.adapter, *config.drafter.split(",")]), progress)
        progress(f"loading {model}")
        source = load_source(model, config.dtype, config.build_device, config.adapter, disk)
        write_tokenizer(directory, source)  # first: a template that is refused must not cost a compile
        tools = tools_of(source, config.tool_format)
        config = with_tuned(source, config, options, progress)
        note_held_types(model, config, progress)
        rows = source.model.get_input_embeddings().weight.shape[0]
        note_tokens(source.tokenizer, source.stop_ids, rows, progress)
        give_back()
        with disk.read_in_turn():
            graphs = assemble(source, config, given_scorer(options))
            _check(source, graphs, config.build_device, progress)
        give_back()
        if config.ranks > 1:
            progress(f"sharing the model between {config.ranks} ranks")
            graphs = share(graphs)

        lowered = compiler.lower(graphs, directory, progress)
        about = _about(source, graphs, lowered) | {
            "tools": None if tools is None else tools.to_json(),
            "widened": _widened(model, config),
            "build_s": round(time.perf_counter() - started, 1),
            "stage_s": times.end(),
        }
        write_manifest(directory, graphs.spec, lowered, about)
    progress(f"engine written to {output} in {time.perf_counter() - started:.0f} s")
    return Path(output)


def _check(source: Source, graphs: Assembled, device: str, progress: OnProgress) -> None:
    """Refuse what cannot be traced, or computes something else than transformers, before anything is compiled, and try
    the drafts. device: where the modules lie. Raises BuildError."""
    settle_readings(source, graphs, device, progress)
    for said in _in_common(graphs):
        progress(f"vocabulary: {said}")
    check_traceable(graphs.step.module)
    progress("comparing the traced model with transformers")
    check_faithful(graphs)
    try_drafts(source, graphs, device, progress)


def note_held_types(model: str, config: EngineConfig, progress: OnProgress) -> None:
    """Say so where weights would be quantised that are quantised already."""
    file = gguf_file(model)
    held = held_types(file) if file and config.weights in ("int8", "int4") else []
    if held:
        progress(
            f"note: {model} holds blocks of {', '.join(held)}, which {config.weights} rounds again; --weights auto "
            "keeps them, and its text is closer to the model's"
        )


def _widened(model: str, config: EngineConfig) -> dict[str, list[str]]:
    """The tensors of a quantised file that became larger, by the type that they have there."""
    file = quantized_file(model)
    keeps = config.weights == "auto" and config.dtype == "bfloat16" and config.device == "cpu"
    return widened_tensors(file) if file and keeps else {}


def _in_common(graphs: Assembled) -> list[str]:
    drafter = graphs.step.get_submodule("module.drafter")
    assert isinstance(drafter, Drafter)
    return said_in_common(drafter)


def _about(source: Source, graphs: Assembled, lowered: Lowered) -> dict[str, Any]:
    """What the manifest says of an engine for people, and of its model: the special tokens of the chat template, and
    the sampling that is recommended."""
    versions = {name: version(name) for name in ("specstep", "transformers")}
    return {
        "model": model_summary(source),
        "tree": describe_tree(graphs.step),
        "vocabularies": _in_common(graphs),
        "stages": lowered.stages,
        "drafts_may_change_text": lowered.drafts_may_change,
        "versions": {"torch": torch.__version__} | versions | lowered.versions,
        "built_on": {key: value for key, value in machine().items() if key != "instructions"},
        "special_tokens": special_tokens(source),
        "sampling": source.sampling,
    } | lowered.details

"""The same step without an artifact: in this process, through torch.compile or eagerly."""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from ..errors import BuildError
from ..progress import silent
from ..runtime.asked.sampling_params import SamplingParams
from ..runtime.engine import Engine
from ..runtime.inductor.torch_session import Program, TorchSession
from ..runtime.text.tokenizer import EngineTokenizer
from .assemble import Assembled, FlatProgram, assemble
from .config import BuildOptions, given_scorer, make_config
from .conversations import chat_template, special_tokens, tools_of
from .drafters.validate import check_traceable
from .faithful import check_faithful
from .inductor.compilers import check_torch
from .settle_readings import settle_readings
from .source import Source, load_source


def jit(model: str, *, prefix_cache_bytes: int = 0, **options: Unpack[BuildOptions]) -> Engine:
    """Compile a model and a drafter in this process, with `torch.compile(fullgraph=True)`: no engine directory.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or "smollm2-135m".
        prefix_cache_bytes: as for `load`.
        options: as for `build`.

    Returns:
        An engine that lives as long as this process.

    Raises:
        BuildError: the model, the drafter or an option is one that no engine can be built from.
    """
    source, graphs = _assembled(model, options)
    check_torch(graphs.spec.device)
    check_traceable(graphs.step.module)
    return _engine(source, graphs, _compiled, prefix_cache_bytes)


def eager(model: str, *, prefix_cache_bytes: int = 0, **options: Unpack[BuildOptions]) -> Engine:
    """Run a model and a drafter as plain modules, for debugging: breakpoints and prints work in them.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or "smollm2-135m".
        prefix_cache_bytes: as for `load`.
        options: as for `build`.

    Returns:
        An engine that lives as long as this process.

    Raises:
        BuildError: the model, the drafter or an option is one that no engine can be built from.
    """
    source, graphs = _assembled(model, options)
    return _engine(source, graphs, _eager, prefix_cache_bytes)


def run_plain(source: Source, graphs: Assembled) -> Engine:
    """Run assembled graphs as `eager` does, unchecked."""
    return _engine(source, graphs, _eager, 0)


def _assembled(model: str, options: BuildOptions) -> tuple[Source, Assembled]:
    """A model, and its graphs with a drafter, checked against transformers."""
    config = make_config(options)
    if config.backend != "inductor":
        raise BuildError(f"backend: expected inductor, which is what runs without an artifact, got {config.backend}")
    if config.weights not in ("auto", "bfloat16"):
        raise BuildError(
            f"weights: expected auto or bfloat16 without an artifact, got {config.weights}; `specstep build` takes it"
        )
    if config.compute_capability is not None:
        raise BuildError(
            "compute_capability: expected None without an artifact, got "
            f"{' '.join(config.compute_capability)}; `specstep build` takes it"
        )
    if config.ranks > 1:
        raise BuildError(f"ranks: expected 1 without an artifact, got {config.ranks}; `specstep build` takes it")
    source = load_source(model, config.dtype, config.device, config.adapter)
    graphs = assemble(source, config, given_scorer(options))
    settle_readings(source, graphs, config.device, silent)
    check_faithful(graphs)
    return source, graphs


def _engine(
    source: Source, graphs: Assembled, lower: Callable[[FlatProgram], Program], prefix_cache_bytes: int
) -> Engine:
    """Lower the programs and put a session behind them."""
    session = TorchSession(graphs.spec, *map(lower, graphs.programs.values()))
    recommended = SamplingParams(**source.sampling) if source.sampling else None
    tools = tools_of(source, graphs.spec.config["tool_format"])
    return Engine(session, _text(source), recommended, tools, prefix_cache_bytes=prefix_cache_bytes)


def _eager(program: FlatProgram) -> Program:
    @torch.inference_mode()
    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return program(*inputs)

    return run


def _compiled(program: FlatProgram) -> Program:
    return _eager(torch.compile(program, fullgraph=True, dynamic=None))  # type: ignore[arg-type]


def _text(source: Source) -> EngineTokenizer | None:
    if source.tokenizer is None:
        return None
    return EngineTokenizer(source.tokenizer.backend_tokenizer, chat_template(source), special_tokens(source))

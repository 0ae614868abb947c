"""The same step without an artifact: in this process, through torch.compile or eagerly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.engine import Engine
from ..runtime.inductor.torch_session import Program, TorchSession
from ..runtime.text import EngineTokenizer
from .assemble import FlatProgram, assemble
from .build import make_config
from .faithful import check_faithful
from .source import Source, load_source
from .writer import chat_template


def jit(model: str, **options: Any) -> Engine:
    """An engine over `torch.compile(fullgraph=True)`. Options: the fields of `EngineConfig`. Raises BuildError."""
    return in_process(model, _compiled, options)


def eager(model: str, **options: Any) -> Engine:
    """An engine over the plain modules, for debugging: breakpoints and prints work. Options as for `jit`."""
    return in_process(model, _eager, options)


def in_process(model: str, lower: Callable[[FlatProgram], Program], options: dict[str, Any]) -> Engine:
    """Load and assemble a model, lower both programs with `lower`, and put a session behind them."""
    config = make_config(options)
    source = load_source(model, config.dtype, config.device)
    graphs = assemble(source, config)
    check_faithful(source, graphs)
    session = TorchSession(graphs.spec, lower(graphs.prefill), lower(graphs.step))
    return Engine(session, _text(source))


def _eager(program: FlatProgram) -> Program:
    @torch.no_grad()
    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return program(*inputs)

    return run


def _compiled(program: FlatProgram) -> Program:
    return _eager(torch.compile(program, fullgraph=True, dynamic=None))  # type: ignore[arg-type]


def _text(source: Source) -> EngineTokenizer | None:
    if source.tokenizer is None:
        return None
    special = {name: token for name, token in source.tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return EngineTokenizer(source.tokenizer.backend_tokenizer, chat_template(source), special)

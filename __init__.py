"""Speculative decoding as a compiled artifact: build an engine once, replay one graph per speculative step.

import specstep
engine = specstep.load("smollm2-135m")  # builds its engine on first use; an engine directory is loaded at once
print(engine.generate("Why is the sky blue?", max_new_tokens=64, chat=True).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import needs_extra

if TYPE_CHECKING:
    from .compile.build import build
    from .compile.config import BuildOptions
    from .compile.jit import eager, jit
    from .compile.source import Source
    from .errors import BuildError, EngineError, InputError, MissingPackageError, SpecstepError
    from .graphs.attention import Pass
    from .graphs.drafters.drafter import Scorer
    from .graphs.drafters.shared_noise import BestTokens
    from .graphs.kept import CacheLayer
    from .graphs.state import State, StateTensor
    from .graphs.tree import Candidates, Expand, TreeShape
    from .model_engines import load
    from .report import DraftedTree, TokenLogprobs
    from .runtime.asked.allowed_tokens import AllowedTokens
    from .runtime.asked.request import Request
    from .runtime.asked.sampling_params import SamplingParams
    from .runtime.engine import Engine
    from .runtime.stream import Generation, Piece, Stream
    from .runtime.submission import Submission
    from .runtime.text.messages import Message

_HOMES = {
    "build": "compile.build",
    "jit": "compile.jit",
    "eager": "compile.jit",
    "BuildOptions": "compile.config",
    "Source": "compile.source",
    "Scorer": "graphs.drafters.drafter",
    "BestTokens": "graphs.drafters.shared_noise",
    "Candidates": "graphs.tree",
    "Expand": "graphs.tree",
    "TreeShape": "graphs.tree",
    "State": "graphs.state",
    "StateTensor": "graphs.state",
    "CacheLayer": "graphs.kept",
    "Pass": "graphs.attention",
    "load": "model_engines",
    "Engine": "runtime.engine",
    "Generation": "runtime.stream",
    "Stream": "runtime.stream",
    "Piece": "runtime.stream",
    "Request": "runtime.asked.request",
    "Submission": "runtime.submission",
    "Message": "runtime.text.messages",
    "SamplingParams": "runtime.asked.sampling_params",
    "TokenLogprobs": "report",
    "DraftedTree": "report",
    "AllowedTokens": "runtime.asked.allowed_tokens",
    "SpecstepError": "errors",
    "BuildError": "errors",
    "EngineError": "errors",
    "InputError": "errors",
    "MissingPackageError": "errors",
}

__all__ = [
    "AllowedTokens",
    "BestTokens",
    "BuildError",
    "BuildOptions",
    "CacheLayer",
    "Candidates",
    "DraftedTree",
    "Engine",
    "EngineError",
    "Expand",
    "Generation",
    "InputError",
    "Message",
    "MissingPackageError",
    "Pass",
    "Piece",
    "Request",
    "SamplingParams",
    "Scorer",
    "Source",
    "SpecstepError",
    "State",
    "StateTensor",
    "Stream",
    "Submission",
    "TokenLogprobs",
    "TreeShape",
    "build",
    "eager",
    "jit",
    "load",
]


def _public(name: str) -> Any:
    """Import a public name when it is first used: `import specstep` itself loads no torch.

    Raises MissingPackageError for what takes an extra that is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specstep' has no attribute {name!r}")
    with needs_extra("build" if _HOMES[name].startswith(("compile.", "graphs.")) else "", f"specstep.{name}"):
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)


if not TYPE_CHECKING:  # a type checker would take any name for public
    __getattr__ = _public


def __dir__() -> list[str]:
    return __all__

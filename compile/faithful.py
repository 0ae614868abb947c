"""Before anything is compiled: does the traced model say what transformers' own forward pass says?"""

from typing import Any

import torch
from torch import Tensor

from ..errors import BuildError
from ..graphs.attention import ATTENTION_NAME, chain_pass
from ..graphs.experts import EXPERTS_NAME
from ..graphs.target import CausalLM
from .assemble import Graphs
from .source import Source

TOLERANCE = {"float32": 2e-3, "float16": 5e-2, "bfloat16": 2e-1}  # of the logits' norm; a wrong mask is off by about 1


def check_faithful(source: Source, graphs: Graphs) -> None:
    """Compare logits on random tokens, past the sliding window where it is short, written to the cache in two
    passes as the engine does it. Raises BuildError naming the architecture."""
    spec = graphs.spec
    target: CausalLM = graphs.step.module.target  # type: ignore[assignment]
    window = getattr(target.config, "sliding_window", None) or 0
    length = min(max(48, window + 16), 768, spec.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, min(spec.vocab_size, 1000), (1, length), generator=generator).to(spec.device)
    with torch.no_grad():
        expected = _transformers_logits(source.model, tokens)
        got = _engine_logits(target, graphs, tokens)
    error = float((got - expected).norm() / expected.norm())
    dtype = str(source.model.dtype).removeprefix("torch.")
    if not error <= TOLERANCE[dtype]:
        name = type(source.model).__name__
        raise BuildError(
            f"model: {name} is not traced faithfully: over {length} tokens its "
            f"logits are off by {error:.2g} of their norm, "
            f"expected at most {TOLERANCE[dtype]:g}; this architecture is not supported"
        )


def _transformers_logits(model: Any, tokens: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        return model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        model.set_experts_implementation(EXPERTS_NAME)


def _engine_logits(target: CausalLM, graphs: Graphs, tokens: Tensor) -> Tensor:
    spec, half = graphs.spec, tokens.shape[1] // 2
    layers = target.layers
    dtype = getattr(torch, spec.caches[0].dtype)
    names = [f"{kind}.{index}" for kind in ("keys", "values") for index in range(layers)]
    shapes = {tensor.name: tensor.shape for tensor in spec.caches}
    caches = [
        torch.zeros(1, *shapes[name][1:], dtype=dtype, device=spec.device)[:, :, : 2 * half + 2] for name in names
    ]
    logits = []
    for start, part in ((0, tokens[:, :half]), (half, tokens[:, half:])):
        where = chain_pass(torch.full((1,), start, device=spec.device), part.shape[1], part.shape[1])
        logits.append(target(part, where, caches[:layers], caches[layers:])[0])
    return torch.cat(logits, 1).float()

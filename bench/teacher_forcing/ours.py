"""Our weights: transformers' own code, with every linear layer computed by the kernels of an engine."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from specstep.compile.config import EngineConfig
from specstep.compile.locate import gguf_file
from specstep.compile.precision import WeightForm, choose_precision
from specstep.compile.source import Source
from specstep.kernels.linear.op import packed_embedding, packed_linear
from specstep.progress import OnProgress
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .scores import Scores, joined, score

FormOf = Callable[[str, Tensor], WeightForm]  # from a layer's name and its weight to what that becomes


class Measured(NamedTuple):
    """scores: of the whole text. size: bytes of all weights, a tied one counted once."""

    scores: Scores
    size: int


def as_built(source: Source, dtype: str, weights: str) -> FormOf:
    """What a build with these options makes of a layer."""
    config = EngineConfig(drafter="none", dtype=dtype, weights=weights)
    file = gguf_file(source.name)
    vocab_size = source.model.get_output_embeddings().weight.shape[0]
    precision = choose_precision(config, [file] if file else [], vocab_size, set())
    return lambda name, weight: precision(weight)


def finer(source: Source, pattern: str) -> FormOf:
    """int4, but int8 for the layers in whose names a regular expression is found."""
    coarse, fine = (as_built(source, "bfloat16", weights) for weights in ("int4", "int8"))
    return lambda name, weight: (fine if re.search(pattern, name) else coarse)(name, weight)


def measure(source: Source, choice: FormOf, sequences: Sequence[list[int]], progress: OnProgress) -> Measured:
    """Score every sequence with the layers that `choice` makes. Only layers that call `linear` are packed; a warning
    says what is not, as experts of a mixture."""
    packed = _pack(source.model, choice)
    held = {tensor.data_ptr(): tensor for tensor in source.model.parameters()}
    looked_up = {module.weight.data_ptr() for module in source.model.modules() if isinstance(module, nn.Embedding)}
    left = [one for address, one in held.items() if one.dim() > 1 and address not in {*packed, *looked_up}]
    if left:
        kept = sum(one.nbytes for one in left) / 1e6
        progress(f"warning: {len(left)} matrices of {kept:.1f} MB keep their dtype: they belong to no linear layer")
    size = sum(tensor.nbytes for tensor in {**held, **packed}.values())
    parts = []
    with torch.inference_mode(), _Packed(packed):
        for number, ids in enumerate(sequences):
            if number % 20 == 0:
                progress(f"sequence {number + 1} of {len(sequences)}")
            logits = source.model(torch.tensor([ids]), use_cache=False).logits
            parts.append(score(logits[0], ids))
    return Measured(joined(parts), size)


def _pack(model: nn.Module, choice: FormOf) -> dict[int, Tensor]:
    """Packed weights by the address of the plain one. As in a build, an embedding is packed where it is a head's, too,
    or becomes int8."""
    packed: dict[int, Tensor] = {}
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)]
    for name, layer in sorted(layers, key=lambda item: isinstance(item[1], nn.Embedding)):  # linear layers first
        weight = layer.weight.detach()
        if weight.data_ptr() in packed:
            continue
        form = choice(name, weight)
        if isinstance(layer, nn.Linear) or form.kind == "int8":
            packed[weight.data_ptr()] = form.make(weight)
    return packed


class _Packed(TorchFunctionMode):
    """Computes `linear` and `embedding` over known weights with our kernels."""

    def __init__(self, packed: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.packed = packed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.linear and (packed := self.packed.get(args[1].data_ptr())) is not None:
            x, weight = args[:2]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return packed_linear(x.contiguous(), packed, bias, weight.shape[0])
        if function is nn.functional.embedding and (packed := self.packed.get(args[1].data_ptr())) is not None:
            ids, weight = args[:2]
            return packed_embedding(packed, ids, *weight.shape)
        return function(*args, **kwargs)

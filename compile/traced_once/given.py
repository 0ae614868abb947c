"""What a layer may read that differs from layer to layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...graphs.attention import LayerCache, Pass
from ...graphs.hybrid_cache import HybridCache
from .alike import PLAIN, Layer, Opaque


@dataclass(frozen=True)
class Given:
    """tensors: by their part in the layer, its arguments, weights, and what is kept of it. text: all else of the
    arguments. passes: where a layer leaves what is read later."""

    tensors: dict[str, Tensor]
    text: str
    passes: list[Pass]
    arguments: Any  # held, so that no other object gets the identity of one of them

    @classmethod
    def of(cls, layer: Layer, arguments: Any) -> "Given":
        """Raises Opaque for arguments that may hold anything."""
        tensors, passes, words = dict[str, Tensor](), dict[int, Pass](), list[str]()
        for name, value in _leaves(arguments, "given"):
            if isinstance(value, LayerCache):
                tensors |= {f"{name} {kind}": tensor for kind, tensor in value.of_layer(layer.number).items()}
            if isinstance(value, HybridCache | Pass):
                where = value if isinstance(value, Pass) else value.where
                passes[id(where)] = where
            if isinstance(value, LayerCache | Pass):
                words.append(f"{name} {id(value)}")
            elif isinstance(value, Tensor):
                tensors[name] = value
            elif type(value) in PLAIN:
                words.append(f"{name} {type(value)} {value!r}")
            else:
                raise Opaque
        for held in (layer.module.named_parameters, layer.module.named_buffers):
            tensors |= {f"its {name}": tensor for name, tensor in held(remove_duplicate=False)}
        return cls(tensors, "\n".join(words), list(passes.values()), arguments)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What tuples, lists and dicts hold, and how many of them, by place."""
    if type(value) in (tuple, list, dict):
        yield f"{name} {type(value)}", len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}[{key!r}]")
    else:
        yield name, value

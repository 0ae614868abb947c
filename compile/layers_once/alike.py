"""Which layers of a model are alike: of one class, with the same attributes, all but their number and their weights."""

import enum
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 3  # layers of a kind: fewer are traced, each of them
CONTENTS = {"_parameters", "_buffers", "_modules"}  # of a module
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, enum.Enum)

Place = tuple[str, str]  # the name of a module in a layer, and an attribute of it


@dataclass(frozen=True)
class Layer:
    """A layer of a list. text: what it has in common with those that are alike. places: where it has its number."""

    module: nn.Module
    number: int
    text: str
    places: tuple[Place, ...]


class Opaque(Exception):
    """Something that cannot be compared with that of another layer."""


def alike_layers(root: nn.Module) -> list[Layer]:
    """The layers of lists that are like LEAST - 1 others of theirs at least."""
    found = []
    for layers in _lists(root):
        places = _number_places(layers)
        described = [_describe(module, number, places) for number, module in enumerate(layers)]
        counts = Counter(layer.text for layer in described if layer is not None)
        found += [layer for layer in described if layer is not None and counts[layer.text] >= LEAST]
    return found


def _lists(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The outermost lists of modules with LEAST or more of them."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) >= LEAST:
            yield list(child)
        else:
            yield from _lists(child)


def _number_places(layers: list[nn.Module]) -> set[Place]:
    """The attributes that are the number of the layer in each of several layers that have them."""
    values: dict[Place, list[bool]] = {}
    for number, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for key, value in vars(module).items():
                if type(value) is int:
                    values.setdefault((name, key), []).append(value == number)
    return {place for place, are_numbers in values.items() if len(are_numbers) > 1 and all(are_numbers)}


def _describe(layer: nn.Module, number: int, places: set[Place]) -> Layer | None:
    """None: it is like no other."""
    lines, own = [], []
    try:
        for name, module in layer.named_modules(remove_duplicate=False):
            lines.append(f"{name}: {type(module)} {id(type(module))}")
            for tensors in (module._parameters, module._buffers):
                lines += [f"{key}: {'None' if x is None else describe_tensor(x)}" for key, x in tensors.items()]
            lines += _hooks(module) if name else []
            for key, value in sorted(vars(module).items()):
                if (name, key) in places:
                    own.append((name, key))
                    lines.append(f"{key}: its number")
                elif key not in CONTENTS and not key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                    lines.append(f"{key}: {_describe_value(value)}")
    except Opaque:
        return None
    return Layer(layer, number, "\n".join(lines), tuple(own))


def describe_tensor(x: Tensor) -> str:
    """All of a tensor but its values."""
    return f"{type(x)} {x.dtype} {tuple(x.shape)} {x.stride()} {x.device} {x.requires_grad}"


def _hooks(module: nn.Module) -> list[str]:
    """Those that run around a module within a layer. Raises Opaque for those that take something out of it."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    for hook in hooks:
        given = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
        # transformers' keep what we do not ask for, but for hidden states.
        if not hook.__module__.startswith("transformers.") or given.get("key", "hidden_states") == "hidden_states":
            raise Opaque
    return [hook.__qualname__ for hook in hooks]


def _describe_value(value: Any) -> str:
    """Two values with one text are the same to a layer's code. Raises Opaque."""
    if isinstance(value, PLAIN):
        return f"{type(value)} {value!r}"
    if isinstance(value, dict):
        inside = [f"{_describe_value(key)}: {_describe_value(item)}" for key, item in value.items()]
    elif isinstance(value, tuple | list):
        inside = [_describe_value(item) for item in value]
    elif isinstance(value, set | frozenset):
        inside = sorted(_describe_value(item) for item in value)
    elif isinstance(value, Tensor):
        raise Opaque
    else:
        return f"{type(value)} {id(value)}"  # a config, say, which they share
    return f"{type(value)} [{', '.join(inside)}]"

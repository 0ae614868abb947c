"""Which layers of a model are alike: of one class, with the same attributes, all but their number and their weights."""

import enum
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
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
            for key, value in sorted(vars(module).items()):
                if (name, key) in places:
                    own.append((name, key))
                    lines.append(f"{key}: its number")
                elif key not in CONTENTS and not key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                    own_method = isinstance(value, MethodType) and value.__self__ is module
                    lines.append(f"{key}: {_describe_value(value.__func__ if own_method else value)}")
    except Opaque:
        return None
    return Layer(layer, number, "\n".join(lines), tuple(own))


def describe_tensor(x: Tensor) -> str:
    """All of a tensor but its values."""
    return f"{type(x)} {x.dtype} {tuple(x.shape)} {x.stride()} {x.device} {x.requires_grad}"


def check_hooks(layer: nn.Module) -> None:
    """Raises Opaque if something within a layer has a hook, which may take something out of it. Those of the layer
    itself run in any case."""
    inner = [module for module in layer.modules() if module is not layer]
    hooks = [
        hook
        for module in inner
        for held in (module._forward_pre_hooks, module._forward_hooks)
        for hook in held.values()
    ]
    for hook in hooks:
        given = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
        # transformers' own keep what nobody asks for here, but for hidden states.
        if not hook.__module__.startswith("transformers.") or given.get("key", "hidden_states") == "hidden_states":
            raise Opaque


def attributes(layer: nn.Module) -> list[dict[str, int]]:
    """The identities of all that the modules of a layer hold."""
    held = (held for module in layer.modules() for held in (vars(module), module._parameters, module._buffers))
    return [{key: id(value) for key, value in each.items()} for each in held]


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
    elif isinstance(value, partial):
        inside = [_describe_value(part) for part in (value.func, value.args, value.keywords)]
    elif isinstance(value, Tensor):
        raise Opaque
    else:
        return f"{type(value)} {id(value)}"  # a config, say, which they share
    return f"{type(value)} [{', '.join(inside)}]"

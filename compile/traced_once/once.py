"""Traces each kind of layer twice, to see that both say the same, and repeats that for the others.

In a trace, Python runs each layer, and nearly all of the time of a trace is that. A layer's nodes are repeated for
another one if nothing tells the two apart but their weights, what is kept of them, and what they are called with:

- they are alike, see `alike_layers`, and no code has looked at the number of a layer while it was traced;
- they are called with the same, but for tensors of the same kind;
- the nodes of two such calls are the same, in all but these tensors;
- what a layer leaves behind besides what it returns is known: writes to its caches, and what it tells a `Pass`.

Any other layer is traced. Where a program reads something else of a layer, `once` raises `Leaked` in its trace.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from ...graphs.layer_number import LayerNumber
from .alike import Layer, Opaque, alike_layers, attributes, check_hooks, describe_tensor
from .call import Call, Traced
from .given import Given
from .repeat import repeat


class Leaked(Exception):
    """A layer was repeated that left more behind than is known."""


class _Once:
    def __init__(self, layers: list[Layer]):
        self.layers = {id(vars(layer.module)): layer for layer in layers}  # tracers wrap modules, and share that
        self.traced: dict[str, Traced] = {}  # the last call of each kind
        self.same: dict[str, tuple[Traced, Traced]] = {}  # the two calls of a kind that were found the same
        self.running: set[int] = set()
        self.found: list[Traced] = []  # all that ever stood for others
        self.repeated: list[tuple[Traced, Call]] = []

    def called(self, original: Callable[..., Any], module: nn.Module, *given: Any, **named: Any) -> Any:
        """What stands for `forward` of a class of layers."""
        layer, mode = self.layers.get(id(vars(module))), get_proxy_mode()
        if layer is None or mode is None or id(layer) in self.running:
            return original(module, *given, **named)
        self.running.add(id(layer))
        try:
            return self._call(layer, mode.tracer, partial(original, module), given, named)
        finally:
            self.running.remove(id(layer))

    def _call(self, layer: Layer, tracer: Any, forward: Callable[..., Any], given: Any, named: Any) -> Any:
        try:
            with _untraced():
                call, kind = _begin(layer, tracer, (given, named))
        except Opaque:
            return forward(*given, **named)
        if self._may_repeat(call, kind):
            self.repeated.append((self.same[kind][1], call))
            with _untraced():
                return repeat(*self.repeated[-1])
        numbers, held = (
            [vars(layer.module.get_submodule(name))[key] for name, key in layer.places],
            attributes(layer.module),
        )
        for number in numbers:
            number.read = False
        result = forward(*given, **named)
        before = self.traced.pop(kind, None)
        with contextlib.suppress(Opaque), _untraced():
            if not any(number.read for number in numbers) and attributes(layer.module) == held:
                self.traced[kind] = traced = Traced(call, result)
                if before is not None and before.text == traced.text:
                    self.same[kind] = before, traced
                    self.found += self.same[kind]
        return result

    def _may_repeat(self, call: Call, kind: str) -> bool:
        if kind not in self.same:
            return False
        one, other = (traced.call.nodes for traced in self.same[kind])
        return all(a is not b or a is node for a, b, node in zip(one, other, call.nodes, strict=True))

    def check_readers(self) -> None:
        """To be called once all is traced. Raises Leaked."""
        if any(traced.leaks() for traced in self.found):
            raise Leaked

    def check_sizes(self) -> None:
        """To be called once it is known which sizes are one: those of the layer that was traced stand for those of the
        one that it was repeated for. Raises Leaked."""
        for traced, call in self.repeated:
            if any(
                describe_tensor(one) != describe_tensor(other)
                for one, other in zip(traced.call.tensors, call.tensors, strict=True)
            ):
                raise Leaked


def _begin(layer: Layer, tracer: Any, arguments: Any) -> tuple[Call, str]:
    """A call, and all that the calls of its kind have in common. Raises Opaque."""
    path, _ = next(reversed(tracer.module_stack.values()))
    layers, _, number = path.rpartition(".")
    if number != str(layer.number):
        raise Opaque
    check_hooks(layer.module)
    call = Call(tracer, Given.of(layer, arguments), layer.number, path)
    return call, f"{id(tracer.graph)} {layers}\n{layer.text}\n{call.kind}"


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    """Looking at tensors, and at sizes, adds nothing to the graph within it."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def layers_traced_once(program: nn.Module) -> Iterator[_Once]:
    """Within it a trace of the program traces each kind of layer twice."""
    layers = alike_layers(program)
    once = _Once(layers)

    def whole(original: Callable[..., Any], module: nn.Module, *given: Any, **named: Any) -> Any:
        result = original(module, *given, **named)
        once.check_readers()
        return result

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for name, key in layer.places:
                held = vars(layer.module.get_submodule(name))
                held[key] = LayerNumber(layer.number)
                stack.callback(held.__setitem__, key, layer.number)
        for kind in {type(layer.module) for layer in layers}:
            stack.enter_context(_replaced(kind, once.called))
        stack.enter_context(_replaced(type(program), whole))
        yield once


def _replaced(kind: type[nn.Module], call: Callable[..., Any]) -> Any:
    """`call`, given the original, stands for `forward` of a class of modules."""
    original = kind.forward

    @wraps(original)
    def replaced(module: nn.Module, *given: Any, **named: Any) -> Any:
        return call(original, module, *given, **named)

    return patch.object(kind, "forward", replaced)

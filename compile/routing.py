"""Which experts each token takes: kept from one pass of a model and given to another.

Rounding turns a token to another expert where two are nearly alike, and everything behind it changes. A pass that is
given the other one's experts there can be compared with it at every token.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

TURNED = 0.05  # of a layer's tokens that rounding may turn to other experts: chosen, not measured


class TokenExperts(NamedTuple):
    """What one layer's tokens take: experts [T, top_k] int64, and their weights of that shape."""

    experts: Tensor
    weights: Tensor

    def at(self, tokens: Any) -> "TokenExperts":
        return TokenExperts(self.experts[tokens], self.weights[tokens])


def mixtures(model: nn.Module) -> list[nn.Module]:
    """Modules that transformers hands the experts of each token: those that `graphs.experts` takes the place of."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


@contextlib.contextmanager
def noted(model: nn.Module) -> Iterator[list[TokenExperts]]:
    """Within it, what the tokens of each mixture take is added to the list, in the order of the calls."""
    taken: list[TokenExperts] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _, experts, weights = (*args, *kwargs.values())
        taken.append(TokenExperts(experts, weights))

    with _ahead(model, note):
        yield taken


@contextlib.contextmanager
def given(model: nn.Module, taken: Sequence[TokenExperts]) -> Iterator[None]:
    """Within it, a token that rounding turned takes the experts that are given for its mixture, call by call. Where
    more tokens of a layer take others than rounding explains, they keep their own."""
    coming = iter(taken)

    def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, experts, weights = (*args, *kwargs.values())
        wanted = next(coming, None)
        if wanted is None or wanted.experts.shape != experts.shape:
            return None
        turned = (experts.sort(-1).values != wanted.experts.sort(-1).values).any(-1, keepdim=True)
        if int(turned.sum()) > max(1, TURNED * len(turned)):
            return None
        return (x, wanted.experts.where(turned, experts), wanted.weights.where(turned, weights)), {}

    with _ahead(model, give):
        yield


@contextlib.contextmanager
def _ahead(model: nn.Module, hook: Any) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in mixtures(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_turn(passes: Sequence[Sequence[TokenExperts]]) -> list[TokenExperts]:
    """What tokens take that were given to a model in several passes, one after the other."""
    return [TokenExperts(*map(torch.cat, zip(*layers, strict=True))) for layers in zip(*passes, strict=True)]


def of_paths(paths: Sequence[Sequence[int]], taken: Sequence[Sequence[TokenExperts]], count: int) -> list[TokenExperts]:
    """What `count` tokens take, from passes over some of them each: paths, their places."""
    whole = []
    for layers in zip(*taken, strict=True):
        experts, weights = (part.new_zeros((count, *part.shape[1:])) for part in layers[0])
        for path, layer in zip(paths, layers, strict=True):
            if len(layer.experts) == len(path):
                experts[torch.tensor(path)], weights[torch.tensor(path)] = layer
        whole.append(TokenExperts(experts, weights))
    return whole

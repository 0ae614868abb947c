"""Before anything is compiled: do the traced models compute what transformers' own forward pass computes?

Both sides run in float32, whatever the engine's dtype: rounding would hide what a model does to its attention scores. A
deep model whose activations are large is off by more than others in float32: where the logits differ, transformers' own
pass is compared with itself in float64, and what that is off by is allowed for. Where rounding could turn tokens to
other experts and nothing says to which, both sides run in float64.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BuildError
from ..graphs.attention import Pass, chain_pass
from ..graphs.hybrid_cache import RECURRENT
from ..graphs.kept import reason
from ..graphs.linear_attention import as_kept
from ..graphs.target import CausalLM
from ..kernels.tree_layout.op import tree_layout
from .assemble import Assembled
from .raised import RaisedTo
from .routing import TokenExperts, given, mixtures, of_paths
from .transformers_pass import GivenCache, Layer, States, transformers_logits

TOLERANCE = 5e-4  # of the logits' norm; rounding is 1e-6 to 1e-5, a wrong window or scale 1e-2 and more
ROUNDINGS, MOST = 4.0, 5e-3  # what is allowed at most: so many times transformers' own rounding, and so much
PATH, CHAIN = 32, 16  # tokens on each path of the tree, and of the chain behind filled slots
SLOTS = 64  # filled at least
LOUD = 2.0  # factor of the given keys and values, for soft caps; with 4, rounding alone is 5e-5 in SmolLM2-135M


class Compared(NamedTuple):
    """An error of logits, as a part of their norm, and the most that rounding explains."""

    error: float
    allowed: float

    @property
    def excess(self) -> float:
        """The error in units of what is allowed; infinite where it is no number."""
        return self.error / self.allowed if self.error == self.error else float("inf")


def check_faithful(graphs: Assembled) -> None:
    """Compare the logits of the target, and of a draft model, with transformers' own: a tree of two branches from an
    empty cache, and a chain behind so many given keys and values that a sliding window is passed.

    Raises BuildError naming the architecture, where the logits differ or the model cannot run either way.
    """
    for module in graphs.step.modules():
        if isinstance(module, CausalLM):
            longest = min(graphs.spec.max_seq_len, module.max_positions or graphs.spec.max_seq_len)
            with torch.no_grad(), RaisedTo(torch.float64 if _hides_experts(module) else torch.float32):
                _check(module, longest)


def _hides_experts(model: CausalLM) -> bool:
    """Whether it has experts, and transformers has no place where it hands them their tokens: rounding, which would
    turn a token to another expert, has to be too small for that."""
    return any("expert" in name for name, _ in model.named_modules()) and not mixtures(model)


def _check(model: CausalLM, longest: int) -> None:
    """longest: the most tokens that a row can hold.

    Rounding turns a token to another expert where two are nearly alike, and its logits with it. Such a token is given
    transformers' experts, see `routing`, and every logit is compared.
    """
    name = type(model.model).__name__
    try:
        tree, layers, states = _compare_tree(model, min(PATH, longest))
        filled, chain = _compare_chain(model, layers, states, longest)
    except Exception as error:  # modeling code raises anything
        raise BuildError(f"model: {name} cannot be traced: {reason(error)}") from error
    failed = [(compared, after) for compared, after in ((tree, 0), (chain, filled)) if compared.excess > 1]
    if not failed:
        return
    (wrong, allowed), after = failed[0]
    raise BuildError(
        f"model: {name} is not traced faithfully: after {after} cached tokens its logits are off by {wrong:.2g} of "
        f"their norm, expected at most {allowed:.2g}; this architecture is not supported"
    )


def _compare_tree(model: CausalLM, length: int) -> tuple[Compared, list[Layer], States]:
    """The greater error of a tree of two branches behind a chain, from an empty cache: each path of `length` tokens is
    compared with transformers' pass over it alone. And the keys and values that transformers computed for the first
    path, and the states that it leaves."""
    trunk = max(2, length * 4 // 9)
    count = 2 * length - trunk
    tokens = _tokens(model, count)
    # The branches take turns, so that the slots of neither follow one another.
    paths = [[*range(trunk), *range(trunk + branch, count, 2)] for branch in range(2)]
    caches = [GivenCache(), GivenCache()]
    passes = [transformers_logits(model, tokens[:, path], cache) for path, cache in zip(paths, caches, strict=True)]
    expected, taken = [logits for logits, _ in passes], of_paths(paths, [taken for _, taken in passes], count)
    layers = [caches[0].added[index] for index in model.cached]

    ours = [_filled(layer, 0, 0, count) for layer in layers]
    root = trunk - 1  # of the tree; what comes before it is a chain
    parents = torch.full((1, count), -1)
    for path in paths:
        parents[0, path[1:]] = torch.tensor(path[:-1])
    parents = (parents[:, root:] - root).to(tokens.device)
    ancestors, depths = tree_layout(parents, torch.ones_like(parents, dtype=torch.bool))[:2]
    states = {name: torch.zeros_like(state) for name, state in _as_kept(model, caches[0].after).items()}
    before = chain_pass(_length(model, 0), root, root, state=states, count=_length(model, root))
    tree = Pass(_length(model, root), depths, ancestors, depths, parents=parents, state=states)
    parts = ((slice(root), before), (slice(root, None), tree))
    logits = [_engine_logits(model, tokens[:, p], where, ours, [t.at(p) for t in taken]) for p, where in parts]
    got = torch.cat(logits, 1)
    compared = [
        _compare(model, got[:, path], wanted, tokens[:, path], (), took)
        for path, wanted, (_, took) in zip(paths, expected, passes, strict=True)
    ]
    return max(compared, key=lambda one: one.excess), layers, caches[0].after


def _compare_chain(model: CausalLM, layers: list[Layer], states: States, longest: int) -> tuple[int, Compared]:
    """How many slots were filled ahead of a chain, past every window, and the error of its logits."""
    window = _window(model, longest)
    length = min(CHAIN, longest // 2)
    filled = min(max(SLOTS, window + CHAIN), longest - length)
    hidden = max(filled + length - window, 0) if window else 0
    ours = [_filled(layer, filled, hidden, length) for layer in layers]
    start = [Layer(layer.keys[:, :, :filled], layer.values[:, :, :filled]) for layer in ours]
    tokens = _tokens(model, length)
    given_before = start, model.cached, states
    expected, taken = transformers_logits(model, tokens, GivenCache(*given_before))
    where = chain_pass(_length(model, filled), length, length, state=_as_kept(model, states))
    got = _engine_logits(model, tokens, where, ours, taken)
    return filled, _compare(model, got, expected, tokens, given_before, taken)


def _as_kept(model: CausalLM, states: States) -> States:
    """States that transformers computed, as rows keep them."""
    return {name: as_kept(model.model, x) if name.startswith(RECURRENT) else x for name, x in states.items()}


def _compare(
    model: CausalLM, got: Tensor, expected: Tensor, tokens: Tensor, before: Sequence[Any], taken: Sequence[TokenExperts]
) -> Compared:
    """Logits of ours and transformers' of tokens. before: what a `GivenCache` starts with."""
    error = _error(got, expected)
    if error <= TOLERANCE:
        return Compared(error, TOLERANCE)
    with RaisedTo(torch.float64):
        exact, _ = transformers_logits(model, tokens, GivenCache(*before), taken)
    rounding = _error(expected.double(), exact)
    return Compared(error, max(TOLERANCE, min(ROUNDINGS * rounding, MOST)))


def _filled(layer: Layer, filled: int, hidden: int, free: int) -> Layer:
    """A cache whose first slots repeat the given keys and values, louder; the first `hidden` of them, which a window
    hides from the last token at least, are of the other sign. `free` slots and two more follow."""
    whole = []
    for tensor in layer:
        slots = torch.arange(filled, device=tensor.device)
        start = tensor[:, :, slots % tensor.shape[2]] * (LOUD * (1 - 2 * (slots < hidden)))[:, None]
        whole.append(torch.cat([start, start.new_zeros(*start.shape[:2], free + 2, start.shape[3])], 2))
    return Layer(*whole)


def _window(model: CausalLM, longest: int) -> int:
    """The largest sliding window that a row can outgrow, 0 if there is none."""
    numbers = [value for name, value in model.config.to_dict().items() if "window" in name or name == "local_attention"]
    return max((n for n in numbers if type(n) is int and n < longest), default=0)


def _tokens(model: CausalLM, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, min(model.vocab_size, 1000), (1, count), generator=generator).to(model.model.device)


def _length(model: CausalLM, length: int) -> Tensor:
    return torch.full((1,), length, device=model.model.device)


def _engine_logits(
    model: CausalLM, tokens: Tensor, where: Pass, caches: list[Layer], taken: Sequence[TokenExperts]
) -> Tensor:
    with given(model, taken):
        keys, values = [layer.keys for layer in caches], [layer.values for layer in caches]
        logits: Tensor = model(tokens, where, keys, values)[0]
        return logits


def _error(got: Tensor, expected: Tensor) -> float:
    """The largest error of a token's logits [1, T, V], as a part of their norm. A shift common to all logits is
    ignored."""
    got, expected = (logits - logits.mean(-1, keepdim=True) for logits in (got, expected))
    return float(((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max())

"""A third party's scorer on small tensors, before anything is traced: what does not fit the interface of `Scorer` is
found where it can be said plainly.

Letters: B batch, T tokens, S cache slots, D greatest depth, N draft nodes, F frontier nodes, K candidates.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...controls import MOST_LOOKAHEAD
from ...errors import BuildError
from ...graphs.attention import chain_pass
from ...graphs.drafters.drafter import Drafter, Scorer
from ...graphs.drafters.merged import parts
from ...graphs.kept import CacheLayer
from ...graphs.state import State, StateTensor, row_state
from ...graphs.target import CausalLM
from ...graphs.tree import Candidates, TreeShape
from .blame import line_of, running_line

ROWS, PROMPT = 2, 5
# Ops that read data back to the host, or whose output shape depends on data: no static engine can hold them.
HOST_READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique", "aten.unique")


def check_drafter(drafter: Drafter, target: CausalLM) -> None:
    """Run each scorer that is not of this package through a prefill and a step. Raises BuildError for what does not
    fit: field, expected, got."""
    for scorer in foreign_scorers(drafter):
        _Trial(scorer, drafter.shape, target).run()


def foreign_scorers(drafter: Drafter) -> list[Scorer]:
    """The scorers of a drafter that are not of this package."""
    return [part for part in parts(drafter.scorer) if not type(part).__module__.startswith("specstep.")]


def check_declared(scorer: Scorer, layers: int) -> None:
    """What is read of a scorer, of a target with so many layers, ahead of its trial. Raises BuildError."""
    for part in parts(scorer):
        name = f"drafter: {type(part).__name__}"
        if "_parameters" not in vars(part):
            raise BuildError(f"{name}: expected an __init__ that calls super().__init__() first, got one without")
        got, last = part.feature_layers, layers + 1
        if not isinstance(got, tuple | list) or not all(type(i) is int and 0 <= i <= last for i in got):
            raise BuildError(
                f"{name}: feature_layers: expected indices of the target's hidden states, 0 to {last}, got {got!r}"
            )
        if part.most_depth is not None and (type(part.most_depth) is not int or part.most_depth < 1):
            raise BuildError(f"{name}: most_depth: expected None or a number from 1 on, got {part.most_depth!r}")
        if type(part.lookahead) is not int or not 1 <= part.lookahead <= MOST_LOOKAHEAD:
            raise BuildError(f"{name}: lookahead: expected 1 to {MOST_LOOKAHEAD}, got {part.lookahead!r}")


def check_traceable(step: nn.Module) -> None:
    """The same trial of a step's drafter, in which nothing may depend on data on the host. Raises BuildError with the
    line that does."""
    drafter, target = step.drafter, step.target
    assert isinstance(drafter, Drafter) and isinstance(target, CausalLM)
    with _NoHostReads():
        check_drafter(drafter, target)


class _NoHostReads(TorchDispatchMode):
    """Refuses `.item()`, `if tensor:`, `nonzero` and the like in a scorer's own code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(HOST_READS) and (line := running_line(__name__)):
            raise BuildError(
                f"drafter: {line}: expected code that a graph can hold, got {func}, which needs the data on the host: "
                "no `.item()`, no `if` on a tensor, no shape that depends on data"
            )
        return func(*args, **(kwargs or {}))


class _Trial:
    """One scorer with the state and the caches that it asks for."""

    def __init__(self, scorer: Scorer, shape: TreeShape, target: CausalLM):
        self.scorer, self.shape, self.target = scorer, shape, target
        self.name = type(scorer).__name__
        weight = target.model.get_output_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
        self.slots = 64 * (1 + (PROMPT + shape.nodes + 2 + sum(shape.frontiers) + shape.depth) // 64)

    @torch.no_grad()
    def run(self) -> None:
        """Raises BuildError."""
        own, caches = self._state(), self._caches()
        declared = row_state(self.slots + 64, self.shape.nodes, self.target.vocab_size) | own
        state = {
            name: torch.full((ROWS, *t.shape), t.fill, dtype=t.dtype, device=self.device)
            for name, t in declared.items()
        }
        state |= {
            name: torch.full(t.shape, t.fill, dtype=t.dtype, device=self.device)
            for name, t in self.scorer.shared().items()
        }
        state["history"] += torch.arange(self.slots + 64, device=self.device) % 7
        one = {name: state[name][:1] for name in declared}
        where = chain_pass(one["lengths"], PROMPT, PROMPT)
        count = torch.full((1,), PROMPT, device=self.device)
        rows = [[cache[:1] for cache in part] for part in caches]
        after = self._call("prefill", one["history"][:, :PROMPT], count, where, one, *rows, self._features(1, PROMPT))
        self._check_state("prefill", own, after, 1)
        state["lengths"] += PROMPT
        state |= {name: tensor.expand(ROWS, *tensor.shape[1:]).clone() for name, tensor in after.items()}
        self._step(state, caches, own)

    def _step(self, state: State, caches: tuple[list[Tensor], list[Tensor]], own: Mapping[str, StateTensor]) -> None:
        moved = torch.ones(ROWS, dtype=torch.int64, device=self.device)
        near = state | {"history": state["history"][:, : self.slots], "moved": moved, "catch_up": moved[:1] - 1}
        near["verified"] = torch.zeros(ROWS, 1 + self.shape.nodes, 3, dtype=torch.int64, device=self.device)
        path = torch.zeros(ROWS, self.shape.depth + 1, dtype=torch.int64, device=self.device)
        more = self._call("commit", near, path, self._features(ROWS, self.shape.nodes + 1))
        kept = self._kept(own, more)
        begun = self._call("begin", near | more, *caches, self.shape)
        if not isinstance(begun, tuple) or len(begun) != 3:
            raise self._error("begin", "three values (candidates, expand, state)", _kind(begun))
        children, expand, after = begun
        self._check_candidates("begin", children, 1)
        previous = 1
        for width in self.shape.frontiers[1:]:
            tokens = children.tokens.flatten(1)[:, :1].expand(-1, width)
            parents = torch.arange(width, device=self.device).remainder(previous).expand(ROWS, -1)
            children = self._guard("expand", expand, tokens, parents)
            self._check_candidates("expand", children, width)
            previous = width
        if not isinstance(after, dict):
            raise self._error("begin and commit", "state as a dict", f"{_kind(after)} of begin")
        self._check_state("begin and commit", own, after | kept, ROWS)

    def _state(self) -> dict[str, StateTensor]:
        own = self._call("state", self.shape)
        if not isinstance(own, dict) or not all(isinstance(tensor, StateTensor) for tensor in own.values()):
            raise self._error("state", "a dict of StateTensor by name", _kind(own))
        self._check_names("state", own)
        return own

    def _check_names(self, method: str, given: Mapping[str, Any]) -> None:
        taken = sorted(set(given) & {*row_state(0, 0, 0), "moved", "verified", "catch_up", "report", "tokens", "count"})
        if taken:
            raise self._error(method, "names that the step does not use itself", ", ".join(taken))

    def _caches(self) -> tuple[list[Tensor], list[Tensor]]:
        layers = self._call("cache_layers")
        good = isinstance(layers, list) and all(
            isinstance(layer, CacheLayer) and all(type(size) is int and size > 0 for size in layer) for layer in layers
        )
        if not good:
            raise self._error("cache_layers", "a list of CacheLayer of positive sizes", repr(layers))
        keys, values = (
            [torch.zeros(ROWS, x.heads, self.slots, x[size], dtype=self.dtype, device=self.device) for x in layers]
            for size in (1, 2)
        )
        return keys, values

    def _features(self, rows: int, tokens: int) -> Tensor | None:
        width = len(self.scorer.feature_layers) * self.target.config.hidden_size
        return torch.zeros(rows, tokens, width, dtype=self.dtype, device=self.device) if width else None

    def _check_candidates(self, method: str, got: Any, width: int) -> None:
        if not isinstance(got, Candidates):
            raise self._error(method, "Candidates", _kind(got))
        given = got.tokens.shape[2] if isinstance(got.tokens, Tensor) and got.tokens.dim() == 3 else 0
        shape = (ROWS, width, max(given, self.shape.top_k))  # at least top_k
        for field, tensor, dtype in zip(Candidates._fields, got, (torch.int64, torch.float32), strict=True):
            self._check_tensor(f"{method}: {field}", tensor, shape, dtype)
        ids = got.tokens.where(got.log_probs > float("-inf"), 0)
        least, most = ids.aminmax()
        if int(least) < 0 or int(most) >= self.target.vocab_size:
            raise self._error(
                f"{method}: tokens", f"ids from 0 to {self.target.vocab_size - 1}", f"{int(least)} to {int(most)}"
            )

    def _kept(self, own: Mapping[str, StateTensor], got: Any) -> State:
        """What is kept of what `commit` returned: the rest, tensors of all rows, is for `begin`."""
        if not isinstance(got, dict):
            raise self._error("begin and commit", "state as a dict", f"{_kind(got)} of commit")
        self._check_names("commit", got)
        for name, tensor in got.items():
            if name in own:
                self._check_tensor(f"commit: state {name}", tensor, (ROWS, *own[name].shape), own[name].dtype)
            elif not isinstance(tensor, Tensor) or tensor.shape[:1] != (ROWS,):
                raise self._error(f"commit: {name}", f"a tensor whose first size is {ROWS}", _kind(tensor))
        return {name: got[name] for name in got if name in own}

    def _check_state(self, method: str, own: Mapping[str, StateTensor], got: Any, rows: int) -> None:
        returned = {name: tensor for name, tensor in own.items() if not tensor.in_place}
        if not isinstance(got, dict) or set(got) != set(returned):
            names = ", ".join(sorted(got)) or "none" if isinstance(got, dict) else _kind(got)
            raise self._error(method, f"the state that it declares ({', '.join(sorted(returned)) or 'none'})", names)
        for name, tensor in returned.items():
            self._check_tensor(f"{method}: state {name}", got[name], (rows, *tensor.shape), tensor.dtype)

    def _check_tensor(self, field: str, got: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not isinstance(got, Tensor) or tuple(got.shape) != shape or got.dtype != dtype:
            raise self._error(field, f"{list(shape)} {_plain(dtype)}", _kind(got))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._guard(method, getattr(self.scorer, method), *arguments)

    def _guard(self, method: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except BuildError:
            raise
        except Exception as error:
            got = f"{type(error).__name__}: {' '.join(str(error).split())}"
            line = line_of(error)
            raise self._error(method, "a call that succeeds", f"{got}, at {line}" if line else got) from error

    def _error(self, field: str, expected: str, got: str) -> BuildError:
        return BuildError(f"drafter: {self.name}: {field}: expected {expected}, got {got}")


def _kind(value: Any) -> str:
    return f"{list(value.shape)} {_plain(value.dtype)}" if isinstance(value, Tensor) else type(value).__name__


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

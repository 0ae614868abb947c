"""A session over torch tensors: static buffers, bound to programs that write the caches in place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .cuda_graph import captured
from .engine_file import EngineSpec, TensorSpec
from .session import Session

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # flat tensors in, flat tensors out, caches written in place


class TorchSession(Session):
    """See `Session`. On a GPU each slot count is one CUDA graph."""

    def __init__(self, spec: EngineSpec, prefill: Program, step: Program):
        super().__init__(spec)
        self._prefill, self._step = prefill, step
        self.state: dict[str, Tensor] = {tensor.name: _allocate(tensor, spec.device) for tensor in spec.state}
        self.caches = {tensor.name: _allocate(tensor, spec.device) for tensor in spec.caches}
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def array(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.spec.device)

    def prefill(self, row: int, tokens: Sequence[int], count: int, slots: int) -> None:
        rows = slice(row, row + 1)
        inputs = self._views(slots, rows) | {name: tensor[rows] for name, tensor in self.state.items()}
        inputs |= {"tokens": self.array(tokens)[None], "count": self.array([count])}
        outputs = self._prefill([inputs[name] for name in self.spec.prefill.inputs])
        for name, tensor in zip(self.spec.prefill.outputs, outputs, strict=True):
            self.state[name][rows] = tensor

    def replay(self, slots: int) -> list[list[int]]:
        if slots not in self._replays:
            self._replays[slots] = self._make_replay(slots)
        return self._replays[slots]().tolist()  # the one device-to-host copy

    def _make_replay(self, slots: int) -> Callable[[], Tensor]:
        """One step over the first `slots` slots: the call, and the small state copied back into its buffers."""
        bound = self.state | self._views(slots, slice(None))
        inputs = [bound[name] for name in self.spec.step.inputs]
        kept = [self.state[name] for name in self.spec.step.outputs[1:]]

        def replay() -> Tensor:
            report, *state = self._step(inputs)
            for buffer, value in zip(kept, state, strict=True):
                buffer.copy_(value)
            return report

        return captured(replay) if self.spec.device == "cuda" else replay

    def _views(self, slots: int, rows: slice) -> dict[str, Tensor]:
        return {name: cache[rows, :, :slots] for name, cache in self.caches.items()}


def _allocate(spec: TensorSpec, device: str) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.fill == 0:  # zeros come from the system untouched: a large cache costs nothing until it is used
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    return torch.full(spec.shape, spec.fill, dtype=dtype, device=device)

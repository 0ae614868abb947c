"""A session: the engine's buffers, bound to its two programs. It admits prompts to rows and replays the step.

Nothing here knows a model: names, shapes and order come from the `EngineSpec`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cuda_graph import captured
from .engine_file import EngineSpec, TensorSpec

Program = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # flat tensors in, flat tensors out, caches written in place

RUNNING, FREE = 0, 3  # the finish codes that the session itself sets; a step may return others


class RowReport(NamedTuple):
    """What one step did to one row: its new tokens, why it ended (0: it runs on), and how many drafted tokens the
    target agreed with, before stop tokens and limits cut the output."""

    tokens: list[int]
    finish: int
    accepted: int


class Session:
    """Static buffers and one call per step. Rows are admitted and released one by one; the others never notice."""

    def __init__(self, spec: EngineSpec, prefill: Program, step: Program):
        self.spec, self._prefill, self._step = spec, prefill, step
        self.state = {tensor.name: _allocate(tensor, spec.device) for tensor in spec.state}
        self.caches = {tensor.name: _allocate(tensor, spec.device) for tensor in spec.caches}
        self.lengths = [0] * spec.max_batch  # host copy, kept from the reports
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def admit(self, row: int, tokens: Sequence[int], limit: int, stop_ids: Sequence[int]) -> None:
        """Give a free row its prompt (at least one token) and fill its caches with all but the last, which is the
        first root.

        limit: most tokens, prompt included, that the row may reach. The row takes part in the next step.
        """
        self.release(row)
        prompt = torch.tensor(tokens, device=self.spec.device)
        self.state["history"][row, : len(tokens)] = prompt
        for start in range(0, len(tokens) - 1, self.spec.prefill_chunk):  # two tokens or more, as the graph wants
            self._prefill_chunk(row, prompt[start : start + self.spec.prefill_chunk], len(tokens) - 1 - start)
        self.state["limits"][row] = limit
        self.state["stop_ids"][row, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
        self.state["finish"][row] = RUNNING
        self.lengths[row] = len(tokens) - 1

    def _prefill_chunk(self, row: int, tokens: Tensor, left: int) -> None:
        count = min(len(tokens), left)
        rows = slice(row, row + 1)
        inputs = self._views(self._slots(self.lengths[row] + len(tokens)), rows)
        inputs |= {name: tensor[rows] for name, tensor in self.state.items()}
        inputs |= {"tokens": tokens[None], "count": torch.tensor([count], device=self.spec.device)}
        outputs = self._prefill([inputs[name] for name in self.spec.prefill.inputs])
        for name, tensor in zip(self.spec.prefill.outputs, outputs, strict=True):
            self.state[name][rows] = tensor
        self.lengths[row] += count

    def step(self) -> list[RowReport]:
        """Advance every running row -> one report per row, no tokens where the row is not running."""
        slots = self._slots(max(self.lengths) + self.spec.scratch)
        if slots not in self._replays:
            self._replays[slots] = self._make_replay(slots)
        report = self._replays[slots]().tolist()  # the one device-to-host copy
        reports = [RowReport(tokens[:count], finish, accepted) for count, finish, accepted, *tokens in report]
        self.lengths = [length + len(row.tokens) for length, row in zip(self.lengths, reports, strict=True)]
        return reports

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

    def release(self, row: int) -> None:
        """Empty a row; its cache slots need no clearing, a row sees only what was written for it."""
        for tensor in self.spec.state:
            self.state[tensor.name][row] = tensor.fill
        self.lengths[row] = 0

    def _slots(self, needed: int) -> int:
        """The smallest slot count a program may be given that holds `needed`: a step costs what the longest row
        needs."""
        return -(-needed // self.spec.slot_step) * self.spec.slot_step

    def _views(self, slots: int, rows: slice) -> dict[str, Tensor]:
        return {name: cache[rows, :, :slots] for name, cache in self.caches.items()}


def _allocate(spec: TensorSpec, device: str) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.fill == 0:  # zeros come from the system untouched: a large cache costs nothing until it is used
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    return torch.full(spec.shape, spec.fill, dtype=dtype, device=device)

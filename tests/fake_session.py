"""A session without a model: every row counts in its own way, a few tokens a step. For tests of what runs sessions."""

import threading
import time

import numpy as np
from specstep.report import FULL, RUNNING, STOPPED
from specstep.runtime.engine_file import EngineSpec, ProgramSpec, TensorSpec
from specstep.runtime.session import Session

VOCABULARY, DEPTH, POISON = 97, 2, 96


class PrefillFailedError(RuntimeError):
    """Raised by a prefill that meets POISON."""


def next_token(tokens):
    """What follows these tokens."""
    return (3 * tokens[-1] + 7 * len(tokens) + sum(tokens) + 1) % (VOCABULARY - 1)


def alone(prompt, limit, stop_ids=()):
    """The output of a request that has an engine to itself."""
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class FakeSession(Session):
    """Accepts 0 to DEPTH drafts in each step. Fails when two threads are inside at once, or when it is told to."""

    def __init__(self, rows, pause=0.0):
        program = ProgramSpec("", (), ())
        shapes = {"history": (200,), "lengths": (), "limits": (), "finish": (), "stop_ids": (16,)}
        fills = {"finish": 3, "stop_ids": -1}
        state = tuple(TensorSpec(name, (rows, *s), "int64", fills.get(name, 0)) for name, s in shapes.items())
        super().__init__(EngineSpec(
            {}, rows, 100, 256, 64, 4, 8, VOCABULARY, (), "cpu", state, (), program, program
        ))  # fmt: skip
        self.state = {tensor.name: np.full(tensor.shape, tensor.fill, np.int64) for tensor in state}
        self.steps, self.pause, self.failing = 0, pause, 0
        self._inside = threading.Lock()

    def array(self, values):
        return np.array(values, np.int64)

    def clear(self, row, slots):
        pass

    def prefill(self, row, tokens, count, slots):
        assert self._inside.acquire(blocking=False), "two threads in one session"
        try:
            if POISON in tokens:
                raise PrefillFailedError("a prompt that fails")
            self.state["lengths"][row] += count
        finally:
            self._inside.release()

    def replay(self, rows, slots):
        assert self._inside.acquire(blocking=False), "two threads in one session"
        try:
            time.sleep(self.pause)
            self.steps += 1
            if self.failing:
                self.failing -= 1
                raise RuntimeError("a step that fails")
            return [self._row(row) for row in range(rows)]
        finally:
            self._inside.release()

    def _row(self, row):
        history, length = self.state["history"][row], int(self.state["lengths"][row])
        accepted = (self.steps + row) % (DEPTH + 1)
        new, finish = [], int(self.state["finish"][row])
        while finish == RUNNING and len(new) <= accepted:
            new.append(next_token(history[: length + 1 + len(new)].tolist()))
            history[length + len(new)] = new[-1]
            if new[-1] in self.state["stop_ids"][row]:
                finish = STOPPED
            elif length + 1 + len(new) >= self.state["limits"][row]:
                finish = FULL
        self.state["lengths"][row] += len(new)
        self.state["finish"][row] = finish
        padded = new + [0] * (DEPTH + 1 - len(new))
        return [len(new), finish, min(accepted, DEPTH) if new else 0, *padded, *range(DEPTH + 1), *[0] * (DEPTH + 1)]

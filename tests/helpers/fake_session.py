"""A session without a model: every row counts in its own way, a few tokens a step. For tests of what runs sessions."""

import threading
import time

import numpy as np
from specstep.controls import TOP_LOGPROBS
from specstep.report import FULL, LOGPROB_STEPS, RUNNING, STOPPED
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
    """Rows that count. Fails when two threads are inside at once, or when it is told to.

    Drafts a chain of `depth` tokens, the first of them right: as many as `accepts` says of a step and a row. Of the
    controls it knows some: a sampled row adds its seed to each token; one that may not follow, by its mask or before
    `min_lengths`, gives way to the next that may. Its caches hold the token of each slot, all that it knows of them,
    and the one that follows it, as a drafter's may.
    """

    def __init__(
        self,
        rows,
        pause=0.0,
        follow=next_token,
        accepts=None,
        depth=DEPTH,
        vocabulary=VOCABULARY,
        stops=(),
        longest=100,
    ):
        """longest: tokens of a row."""
        room = longest + 100
        nodes, words = depth + 1, -(-vocabulary // 32)
        state = tuple(TensorSpec(name, (rows, *shape), dtype, fill) for name, (shape, dtype, fill) in {
            "history": ((room,), "int64", 0), "lengths": ((), "int64", 0), "limits": ((), "int64", 0),
            "finish": ((), "int64", 3), "stop_ids": ((16,), "int64", -1), "prompt_lengths": ((), "int64", 0),
            "tree_tokens": ((nodes,), "int64", 0), "tree_parents": ((nodes,), "int64", -1),
            "sampling": ((7,), "float32", 0), "seeds": ((), "int64", 0), "min_lengths": ((), "int64", 0),
            "bias_ids": ((8,), "int64", -1), "bias": ((8,), "float32", 0), "banned_words": ((3, 4), "int64", -1),
            "prediction": ((room,), "int64", -1), "prediction_lengths": ((), "int64", 0),
            "logprobs": ((), "int64", -1), "masked": ((), "int64", 0), "learning": ((), "int64", 1),
            "allowed": ((nodes, words), "int32", 0),
        }.items())  # fmt: skip
        program = ProgramSpec("", (), ())
        caches = tuple(TensorSpec(name, (rows, 1, room + 56, 1), "float32") for name in ("own", "following"))
        super().__init__(EngineSpec(
            {"backend": "inductor", "nodes": depth, "depth": depth}, rows, longest, room + 56, 64, 4, 0, (), (), 8,
            vocabulary, stops, "cpu", state, (), caches, program, program,
        ))  # fmt: skip
        self.caches = np.zeros((rows, room + 56, 2), np.int64)
        self.state = {tensor.name: np.full(tensor.shape, tensor.fill, tensor.dtype) for tensor in state}
        self.steps, self.pause, self.failing, self.copies = 0, pause, 0, []
        self._follow, self._depth = follow, depth
        self._accepts = accepts or (lambda step, row: (step + row) % (depth + 1))
        self._inside = threading.Lock()

    def set(self, name, row, values):
        given = np.asarray(values)
        if given.size:
            self.state[name][(row, slice(len(given))) if given.ndim else row] = given

    def numpy(self, name, row):
        return self.state[name][row].copy()

    def clear(self, row, slots):
        self.caches[row, :slots] = 0

    def copy(self, source, target, slots):
        self.copies.append((source, target))
        for tensor in self.state.values():
            tensor[target] = tensor[source]
        self.caches[target, :slots] = self.caches[source, :slots]

    def make_store(self, slots):
        self.store = np.full((slots, 2), -1, np.int64)

    def keep(self, row, start, place, count):
        self.store[place : place + count] = self.caches[row, start : start + count]

    def recall(self, row, start, place, count):
        self.caches[row, start : start + count] = self.store[place : place + count]

    def prefill(self, row, tokens, count, slots):
        assert self._inside.acquire(blocking=False), "two threads in one session"
        try:
            start = int(self.state["lengths"][row])
            assert self.state["history"][row, start : start + len(tokens)].tolist() == list(tokens)
            if POISON in tokens:
                raise PrefillFailedError("a prompt that fails")
            self.state["lengths"][row] += count
            self._fill_caches(row, start)
        finally:
            self._inside.release()

    def replay(self, rows, slots, nodes, catch_up):
        assert self._inside.acquire(blocking=False), "two threads in one session"
        try:
            time.sleep(self.pause)
            self.steps += 1
            if self.failing:
                self.failing -= 1
                raise RuntimeError("a step that fails")
            report = np.array([self._row(row, nodes or 0) for row in range(rows)])
            for row in [row for row in range(rows) if nodes is not None and self.state["finish"][row] == RUNNING]:
                self._draft(row)
            return report
        finally:
            self._inside.release()

    def _fill_caches(self, row, start):
        """From a slot on, up to the row's length."""
        tokens = self.state["history"][row, : int(self.state["lengths"][row]) + 1]
        self.caches[row, start : len(tokens) - 1] = np.stack([tokens[start:-1], tokens[start + 1 :]], 1)

    def _tokens(self, row):
        """Prompt and output, the root last: what lies in the caches, and the root."""
        length = int(self.state["lengths"][row])
        tokens = [*self.caches[row, :length, 0].tolist(), int(self.state["history"][row, length])]
        assert tokens[1:] == self.caches[row, :length, 1].tolist(), "a slot that another text decided"
        return tokens

    def _draft(self, row):
        """The tree of the next step."""
        tokens, chain = self._tokens(row), []
        for level in range(self._depth):
            following = self._follow(tokens + chain)
            right = level < self._accepts(self.steps + 1, row)
            chain.append(following if right else (following + 1) % self.spec.vocab_size)
        self.state["tree_tokens"][row, 1:] = chain
        self.state["tree_parents"][row, 1:] = range(self._depth)

    def _choice(self, row, tokens, node):
        """What follows a node, `tokens` with its path."""
        token = self._follow(tokens)
        if self.state["sampling"][row, 0]:
            token = (token + int(self.state["seeds"][row])) % self.spec.vocab_size
        banned = set()
        if len(tokens) < self.state["min_lengths"][row]:
            banned |= set(self.state["stop_ids"][row].tolist())
        if self.state["masked"][row]:
            bits = self.state["allowed"][row, node].view(np.uint32)
            banned |= {t for t in range(self.spec.vocab_size) if not bits[t // 32] >> (t % 32) & 1}
        if banned.issuperset(range(self.spec.vocab_size)):
            return 0
        while token in banned:
            token = (token + 1) % self.spec.vocab_size
        return token

    def _row(self, row, nodes):
        """What a step of so many nodes does to a row -> its row of the report."""
        tokens, length = self._tokens(row), int(self.state["lengths"][row])
        self.state["history"][row, length + 1 : length + 2 + self._depth] = POISON  # of every row, as in the graph
        drafted = [*self.state["tree_tokens"][row].tolist(), -1]  # -1: what follows the last node was not drafted
        new, accepted, missed, finish = [], 0, [0], int(self.state["finish"][row])
        while finish == RUNNING and accepted == len(new):
            new.append(self._choice(row, tokens + new, accepted))
            self.state["history"][row, length + len(new)] = new[-1]
            if new[-1] in self.state["stop_ids"][row]:
                finish = STOPPED
            elif length + 1 + len(new) >= self.state["limits"][row]:
                finish = FULL
            elif self.state["tree_parents"][row, 1] == 0 and new[-1] == drafted[accepted + 1]:
                if accepted == nodes:  # right, but not verified
                    missed = [accepted + 1]
                    break
                accepted += 1
        self.state["lengths"][row] += len(new)
        self._fill_caches(row, length)
        self.state["finish"][row] = finish
        rest, levels = [0] * (self._depth + 1 - len(new)), range(self._depth + 1)
        nodes = [*range(accepted + 1), *missed, *levels][: len(levels)]
        columns = [
            len(new),
            finish,
            accepted,
            self._depth,
            *[0] * self._depth,
            *new,
            *rest,
            *nodes,
            *[0 for _ in levels],
        ]
        if self.state["logprobs"][row] < 0:
            return columns + [0] * (len(levels) * (1 + 2 * TOP_LOGPROBS))
        tops = [[(token + place) % self.spec.vocab_size for place in range(TOP_LOGPROBS)] for token in new + rest]
        likeliest = [token for top in tops for token in top]
        return columns + [logprob_of(token) for token in new + rest] + likeliest + [*map(logprob_of, likeliest)]


def logprob_of(token):
    """What the session reports as the log-probability of a token."""
    return -(token % 8 + 1) * LOGPROB_STEPS // 8

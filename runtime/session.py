"""A session: an engine's buffers, its rows and its programs. It admits prompts to rows and replays the step.

Nothing here knows a tensor library: what is bound to the programs, and how, is the backend's (`buffers.Buffers`, filled
in by `inductor/torch_session.py`, `onnx.py` and `tensorrt/session.py`).
A session is not safe to be called from several threads at once; `scheduler.Scheduler` makes it so.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from numpy import int32, int64
from numpy.typing import NDArray

from ..backends import BACKENDS
from ..controls import LAG
from ..report import CHEAP, NOTHING, RUNNING, WHOLE, DraftedTree, RowReport
from .buffers import Buffers
from .engine_file import EngineSpec


class LostRowError(RuntimeError):
    """A row that cannot be freed: the session is of no more use."""


class Launched(NamedTuple):
    """A step that was begun."""

    running: list[int]  # rows that take part
    rows: int  # rows that the step computes
    nodes: int  # drafted nodes verified
    draft: str  # what drafts the next trees
    report: Callable[[], NDArray[int64]]  # waits for the report


class Session(Buffers):
    """Rows of static buffers and one call per step. Rows are admitted and released one by one; the others never
    notice."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.lengths = [0] * spec.max_batch  # tokens in each row's cache: a host copy, kept from the reports
        self._taken: dict[int, int] = {}  # rows that were admitted and not released -> alternatives asked for, or -1
        self._unfilled: dict[int, list[int]] = {}  # rows of which not all is in the caches -> their prompts
        self._running: list[int] = []  # the others, in order: those that take part in the next step
        self._predicted = [0] * spec.max_batch  # tokens of each row's prediction
        kept = {*spec.recurrent, *(cache.name for cache in spec.caches)}
        self._gaps = not kept.isdisjoint(spec.drafter_tensors)  # what is left out, these lack
        # 10 tokens, all processed: a cheap step makes 13, pending 3, processed 10; a whole one that adds 2 15, 0, 15.
        self._pending = [0] * spec.max_batch  # tokens of each row since a drafter that pauses took part
        self._processed = [0] * spec.max_batch  # tokens of each row, up to the first that such a drafter left out
        self.chunk_end = lambda end: end  # where a chunk that may end at a token had better end, see `PrefixCache`
        self._written = [0] * spec.max_batch  # slots of each row that anything was written to since it was cleared

    @property
    def any_nodes(self) -> bool:
        """Whether a step may verify fewer nodes than a tree has."""
        return BACKENDS[self.spec.config["backend"]].any_nodes

    @property
    def draft_kinds(self) -> tuple[str, ...]:
        """What may draft the trees of a step."""
        nothing = [] if self.spec.plain is None else [NOTHING]
        return WHOLE, *([CHEAP] if self.spec.catch_up else []), *nothing

    @property
    def free_rows(self) -> int:
        """How many more prompts can be admitted."""
        return self.spec.max_batch - len(self._taken)

    def admit(
        self, tokens: Sequence[int], limit: int, stop_ids: Sequence[int], controls: Mapping[str, Any] | None = None
    ) -> int:
        """`begin`, and `fill` to the end -> the row, which takes part in the next step."""
        row = self.begin(tokens, limit, stop_ids, controls)
        while not self.fill(row, self.spec.prefill_chunk):
            pass
        return row

    def begin(
        self, tokens: Sequence[int], limit: int, stop_ids: Sequence[int], controls: Mapping[str, Any] | None = None
    ) -> int:
        """Give a free row, the lowest, a prompt (at least one token) -> the row. It takes part in steps once it is
        filled; until then the rows that step must lie below it.

        limit: most tokens, prompt included, that the row may reach. controls: what else the request asks for, by the
        names of `controls`: a number or a list, for the front of the row of that state tensor. Raises RuntimeError when
        no row is free.
        """
        if not self.free_rows:
            raise RuntimeError(f"admit: expected a free row, got {self.spec.max_batch} rows in use; release one")
        row = min(set(range(self.spec.max_batch)) - set(self._taken))
        given = dict(controls or {})
        self._taken[row], self._unfilled[row] = given.get("logprobs", -1), list(tokens)
        try:
            self._clean(row)
            self._predicted[row] = given.get("prediction_lengths", 0)
            self._pending[row] = 1  # no prefill processes the last token, or for a head the features ahead of it
            if "seeds" in given:
                given["seeds"] %= 2**63  # the graph's arithmetic knows no negative ones
            given |= {"limits": limit, "stop_ids": list(stop_ids), "prompt_lengths": len(tokens), "history": tokens}
            for name, values in given.items():
                self.set(name, row, values)
        except BaseException:
            self._give_back(row)
            raise
        return row

    def resume(self, row: int, count: int, runs: Sequence[tuple[int, int, int]]) -> None:
        """Take the first tokens of the row's prompt, all but two at most, from the store: no prefill is needed for
        `count` of them. runs: arguments of `recall`. It is called ahead of `fill`."""
        for start, place, slots in runs:
            self._written[row] = start + slots
            self.recall(row, start, place, slots)
        self.lengths[row] = self._processed[row] = count
        self.set("lengths", row, count)

    def next_chunk(self, row: int, most: int) -> int:
        """How many tokens `fill` would prefill."""
        start = self.lengths[row]
        count = min(len(self._unfilled[row]) - 1 - start, most, self.spec.prefill_chunk)
        better = self.chunk_end(start + count) - start
        return better if better > 1 else count

    def fill(self, row: int, most: int) -> bool:
        """Prefill the next chunk of the row's prompt, of at most so many tokens (2 or more) -> whether the caches have
        all but the last token, which is the first root. A row whose prefill fails is free again."""
        tokens, start = self._unfilled[row], self.lengths[row]
        try:
            if count := self.next_chunk(row, most):  # of two tokens or more, as the graph wants
                chunk = tokens[start : start + min(most, self.spec.prefill_chunk)]
                self._written[row] = start + len(chunk) + self.spec.scratch  # the first step's tree is drafted behind
                self.prefill(row, chunk, count, self.slots_for(self._written[row]))
                self.lengths[row] += count
                self._processed[row] = self.lengths[row]
            if self.lengths[row] < len(tokens) - 1:
                return False
            self.set("finish", row, RUNNING)
        except BaseException:
            self._give_back(row)
            raise
        del self._unfilled[row]
        self._note_running()
        return True

    def tree(self, row: int, nodes: int | None = None) -> DraftedTree:
        """The tree that the row's next step verifies, if it verifies so many nodes, all by default."""
        end = 1 + (self.spec.nodes if nodes is None else nodes)
        tokens, parents = (self.numpy(name, row)[1:end].tolist() for name in ("tree_tokens", "tree_parents"))
        root = int(self.numpy("history", row)[self.lengths[row]])
        return DraftedTree([root, *tokens], [-1, *parents])

    def plant(self, row: int, tree: DraftedTree) -> None:
        """Have the row's next step verify this tree, of at most as many nodes and levels as drafted ones have, instead
        of the drafted one."""
        places = self.spec.nodes + 1 - len(tree.tokens)
        self.set("tree_tokens", row, [*tree.tokens, *[0] * places])
        self.set("tree_parents", row, [*tree.parents, *[-1] * places])

    def allow(self, row: int, bits: NDArray[int32]) -> None:
        """Say what may follow each node of `tree` in the next step: bit j of word w of a node's row of bits
        [T, ceil(V / 32)] stands for token 32 * w + j. The row was admitted with the control `masked`."""
        self.set("allowed", row, bits)

    def processed(self, row: int) -> int:
        """Tokens of a row from its first on that are in all caches, the drafter's, too."""
        return self._processed[row]

    def step(self, nodes: int | None = None, draft: str = WHOLE) -> dict[int, RowReport]:
        """`begin_step`, and `end_step`."""
        return self.end_step(self.begin_step(nodes, draft))

    def begin_step(self, nodes: int | None = None, draft: str = WHOLE) -> Launched:
        """Advance every row that is filled. nodes: how many of the drafted nodes are verified, all by default; draft:
        what drafts the next trees; the last of `draft_kinds` for what is not among them. A step that drafts nothing
        verifies the roots alone. A text depends on neither. Where nothing was drafted, the next report's `missed`
        means nothing."""
        draft = draft if draft in self.draft_kinds else self.draft_kinds[-1]
        nodes = 0 if draft == NOTHING else self.spec.nodes if nodes is None else nodes
        running, (rows, slots) = self._running, self.next_size()
        if max([0, *running]) >= rows:
            raise RuntimeError(f"step: expected filled rows below {rows}, which is not, got {running}; compact them")
        for row in range(rows):
            self._write_tree(row)  # in use or not
        behind = min(max((self._pending[row] for row in running), default=0), LAG)
        catch_up = behind + min(nodes, self.spec.depth) + 1 if draft == WHOLE and self.spec.catch_up else 0
        report = self.begin_replay(rows, slots, None if draft == NOTHING else nodes, catch_up)
        return Launched(running, rows, nodes, draft, report)

    def end_step(self, launched: Launched, rows: Collection[int] | None = None) -> dict[int, RowReport]:
        """Wait for a step -> the report of each row, without tokens where it has finished. Steps end in the order in
        which they began. rows: those that still are what they were, all that took part by default."""
        report = launched.report()
        kept = [row for row in launched.running if rows is None or row in rows]
        reports = {row: RowReport.read(report[row], self._taken[row]) for row in kept}
        for row, told in reports.items():
            self._advance(row, len(told.tokens), launched.draft)
        return reports

    def may_overlap(self, launched: Launched) -> bool:
        """Whether the next step may begin before this one has ended: nothing that the host decides waits for it."""
        return self.overlaps and launched.draft != CHEAP and not any(self._pending[row] for row in launched.running)

    def _advance(self, row: int, tokens: int, drafted: str) -> None:
        """Note what a step did to a row."""
        gapless = self._processed[row] >= self.lengths[row] - self._pending[row]
        self.lengths[row] += tokens
        self._write_tree(row)  # by the next step, which may have begun
        if drafted != WHOLE and self._gaps:  # features of a step that drafted nothing are lost
            self._pending[row] = self._pending[row] + tokens if drafted == CHEAP else 0
            return
        if gapless and self._pending[row] <= LAG:
            self._processed[row] = self.lengths[row]
        self._pending[row] = 0

    def _write_tree(self, row: int) -> None:
        """Note that a step writes its tree behind a row."""
        self._written[row] = max(self._written[row], self.lengths[row] + self.spec.scratch)

    def release(self, row: int) -> None:
        """Take a row out of the coming steps and make it free. A free row may be released again."""
        try:
            self._empty(row)
        finally:
            self._taken.pop(row, None)
            self._unfilled.pop(row, None)
            self._note_running()

    def _give_back(self, row: int) -> None:
        """Release a row whose prompt failed. Raises LostRowError where that fails as well."""
        try:
            self.release(row)
        except BaseException as error:
            raise LostRowError(f"row {row}: expected to free it, got {type(error).__name__}: {error}") from error

    def compact(self, rows: int) -> dict[int, int]:
        """Move the filled rows from row `rows` on to free rows below -> where each moved row is now. A move costs what
        the row's caches hold."""
        free = sorted(set(range(rows)) - set(self._taken))
        moves = dict(zip((row for row in self._running if row >= rows), free, strict=False))
        for source, target in moves.items():
            # All that the target held is overwritten, with zeros where the source holds nothing.
            slots = min(max(self._written[source], self._written[target]), self.spec.most_slots)
            self.copy(source, target, slots)
            for of_row in (self.lengths, self._predicted, self._written, self._pending, self._processed):
                of_row[target] = of_row[source]
            self._taken[target] = self._taken.pop(source)
            self._empty(source)
        self._note_running()
        return moves

    def next_size(self) -> tuple[int, int]:
        """Rows and slots of the next step. Rows: the smallest power of 2, or all, that holds those that are filled, but
        none that is being filled, to which a step would write its tree. Slots: what the longest needs, and the
        longest prediction. A step costs what these cost, and there are few numbers of rows to bind or capture a step
        for."""
        rows = rows_for(1 + max(self._running, default=0), self.spec.max_batch)
        rows = min([rows, *self._unfilled])
        longest = max(self.lengths[:rows], default=0) + self.spec.scratch
        return rows, self.slots_for(max([longest, *self._predicted[:rows]]))

    def _note_running(self) -> None:
        """Called where rows were filled, moved or released. A step looks at these rows several times."""
        self._running = sorted(self._taken.keys() - self._unfilled.keys())

    def slots_for(self, needed: int) -> int:
        """The smallest slot count a program may be given that holds `needed`: a step costs what the longest row
        needs."""
        return -(-needed // self.spec.slot_step) * self.spec.slot_step

    def _empty(self, row: int) -> None:
        """Give a row that ends its first values, and what its caches take to the system, unless a step that has begun
        may still write to it."""
        self._reset(row)
        if not self.overlaps:
            self._clean(row)

    def _clean(self, row: int) -> None:
        """Remove what the row's caches held before. Slots that nothing may attend to still take part in matrix products
        with a weight of 0, and 0 * NaN is NaN: an old NaN or inf would reach the new request."""
        if self._written[row]:
            self.clear(row, min(self._written[row], self.spec.most_slots))
            self._written[row] = 0

    def _reset(self, row: int) -> None:
        """Give the row's state the values of an empty row."""
        for tensor in self.spec.state:
            self.set(tensor.name, row, tensor.fill)
        self.lengths[row] = self._predicted[row] = self._pending[row] = self._processed[row] = 0


def rows_for(count: int, most: int) -> int:
    """The rows of a step that runs the first `count` of `most`: a power of 2, or all of them."""
    return min(1 << max(count - 1, 0).bit_length(), most)

"""Keys and values of prompts and answers that were served, kept for prompts that begin like them.

Blocks have BLOCK tokens. Slot p of a drafter's cache may depend on tokens up to p + lookahead, so a block has the slots
that its tokens and those before them decide: with a lookahead of 1, as EAGLE-3 has it, block 0 keeps slots 0 to 30 and
block 1 slots 31 to 62, for slot 31 needs token 32. What else a drafter keeps comes anew from the prompt's last chunk,
which is always prefilled.

Where a model keeps states of recurrent layers alone, blocks are their tokens, which tell where a state was. A state
cannot be cut back to a block's end, so a row that ends leaves one more block, of fewer tokens, with its state: the next
turn of a conversation goes on from there.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import count

from ..errors import InputError
from .kv_events import KVEvents
from .manifest_fields import DTYPE_BYTES
from .row_states import RowStates, TokenBlock
from .session import Session

BLOCK = 32

BlockKey = tuple[int | str, tuple[int, ...]]  # the number of the block before, or the scope of a first one; its tokens


Chain = list[tuple[BlockKey, TokenBlock]]  # the blocks that a row's tokens begin with, in order


class PrefixCache:
    """Blocks within a budget, in the store of a session; the least recently used make room for others.

    A block is found by its tokens and the block before it, back to the first and its scope: dictionary keys, so all
    tokens are compared. What one scope keeps, no other finds.
    """

    def __init__(self, session: Session, budget: int, events: KVEvents | None = None):
        """budget: most bytes; events: what is told of each block that comes and goes. Raises InputError for fewer bytes
        than a block takes."""
        self.session, self._lookahead, self.events = session, session.spec.lookahead, events
        elements = ((math.prod(tensor.shape[1:]) // tensor.shape[2], tensor.dtype) for tensor in session.spec.caches)
        self.block_bytes = BLOCK * sum(size * DTYPE_BYTES[dtype] for size, dtype in elements)
        if budget < self.block_bytes:
            raise InputError(
                f"prefix_cache_bytes: expected 0, or at least {self.block_bytes}, which {BLOCK} tokens take, "
                f"got {budget}"
            )
        parts = (1 if session.spec.recurrent else 0) + (1 if self.block_bytes else 0)
        self._states = RowStates(session, budget, parts) if session.spec.recurrent else None
        self.most_blocks = self._places(budget // parts)
        if self._states is not None:
            session.chunk_end = self._end_of_block
        session.make_store(self.most_blocks * BLOCK)
        self._free = deque(range(self.most_blocks))
        self._blocks: dict[BlockKey, TokenBlock] = {}
        # By number, which is quicker to hash: the least recently used first, a block after those that follow it.
        self._recent: OrderedDict[int, BlockKey] = OrderedDict()
        self._numbers = count()
        self._ends: Counter[int | str] = Counter()  # ahead of how many shorter blocks each block, or a scope, is

    def _places(self, budget: int) -> int:
        """How many blocks there are at most. Those that take nothing are as many as lie ahead of all states."""
        if self._states is not None and not self.block_bytes:
            return self._states.most * -(-self.session.spec.max_seq_len // BLOCK)
        return max(budget // self.block_bytes, 1)

    @property
    def blocks(self) -> int:
        """How many are kept now, from any thread."""
        return len(self._blocks)

    @property
    def used_bytes(self) -> int:
        """What the blocks and states take that are kept now."""
        return len(self._blocks) * self.block_bytes + (self._states.used_bytes if self._states else 0)

    def recall(self, row: int, scope: str, prompt: Sequence[int]) -> int:
        """Fill the caches of a row that was begun with what is kept of its prompt -> how many of its tokens need no
        prefill. The last token is no part of a prefill, and one more is left to it: what else a drafter keeps."""
        found = self._find(scope, prompt, len(prompt), [])
        if self._states is not None:
            found = self._last_state(self._states, scope, prompt[:-1], found[: (len(prompt) - 1) // BLOCK])
        last = len(found[-1][0][1]) if found else 0
        cached = min(BLOCK * (len(found) - 1) + last, len(prompt) - 1) - self._lookahead
        if cached < 1:
            return 0
        self._touch(found)
        self.session.resume(row, cached, self._runs([block.place for _, block in found], 0, last))
        if self._states is not None:
            self._states.recall(row, found[-1][1])
        return cached

    def keep(
        self,
        row: int,
        scope: str,
        tokens: Sequence[int],
        count: int,
        known: Chain,
        ends: bool = False,
        settled: bool = True,
    ) -> Chain:
        """Keep what is new of a row -> its blocks. tokens: its first `count` are all that it has, its root included,
        which is the last; known: what this returned before for the same request, so that a long prompt is not compared
        from its start on with each of its chunks. ends: nothing more comes of the row. settled: no step that has begun
        takes its state further."""
        found = self._add(row, scope, tokens, count, known)
        covered = self.session.lengths[row] + self._lookahead
        if self._states is None or not settled or covered > count or covered // BLOCK != len(found):
            return found
        if ends and self._states.of_drafter:  # after a step, those have read the root as well
            return found
        if covered % BLOCK == 0:
            self._states.keep(row, found[-1][1])
        elif ends:
            self._keep_end(row, scope, tuple(tokens[BLOCK * len(found) : covered]), found, self._states)
        return found

    def _keep_end(self, row: int, scope: str, tokens: tuple[int, ...], found: Chain, states: RowStates) -> None:
        """Keep a row's state behind these tokens, fewer than a block's, which follow its blocks; and their slots."""
        key = found[-1][1].number if found else scope, tokens
        block = self._blocks.get(key)
        if block is None:
            places = self._make_room(1, found)
            if not places:
                return
            block = TokenBlock(next(self._numbers), places[0])
            try:
                for run in self._runs(places, len(found), len(tokens)):
                    self.session.keep(row, *run)
            except BaseException:
                self._free += places
                raise
            self._blocks[key], self._recent[block.number] = block, key
            self._ends[key[0]] += 1
        states.keep(row, block)
        self._touch([*found, (key, block)])

    def _last_state(self, states: RowStates, scope: str, prompt: Sequence[int], found: Chain) -> Chain:
        """The blocks of a prompt, up to the last with a state, which may be a shorter one. found: its whole ones."""
        whole = len(states.last(found))
        for index in range(len(found), whole - 1, -1):
            before = found[index - 1][1].number if index else scope
            rest = tuple(prompt[BLOCK * index : BLOCK * (index + 1) - 1]) if before in self._ends else ()
            for size in range(len(rest), 0, -1):
                key = before, rest[:size]
                if key in self._blocks and states.has(self._blocks[key]):
                    return [*found[:index], (key, self._blocks[key])]
        return found[:whole]

    def _end_of_block(self, end: int) -> int:
        """The last token up to `end` after which a block has all of its slots."""
        return (end + self._lookahead) // BLOCK * BLOCK - self._lookahead

    def _add(self, row: int, scope: str, tokens: Sequence[int], count: int, known: Chain) -> Chain:
        """See `keep`."""
        found = self._find(scope, tokens, count, known)
        first = len(found)
        if first == count // BLOCK and first == len(known):
            return found
        places = self._make_room(count // BLOCK - first, found)
        try:
            for run in self._runs(places, first, BLOCK):
                self.session.keep(row, *run)
        except BaseException:
            self._free += places
            raise
        for index, place in enumerate(places, first):
            before = found[-1][1].number if found else scope
            found.append(((before, _tokens(tokens, index)), TokenBlock(next(self._numbers), place)))
        self._blocks.update(found[first:])
        self._recent.update((block.number, key) for key, block in found[first:])
        self._touch(found)
        if self.events is not None and places:
            new = ((block.number, tokens) for (_, tokens), block in found[first:])
            self.events.stored(found[first][0][0], new)
        return found

    def _find(self, scope: str, tokens: Sequence[int], count: int, known: Chain) -> Chain:
        """The blocks that the first `count` tokens begin with. known: the first of them, if they are still kept."""
        # A block goes after those that follow it: the last one tells of all.
        found = [*known] if known and self._blocks.get(known[-1][0]) == known[-1][1] else []
        for index in range(len(found), count // BLOCK):
            key = found[-1][1].number if found else scope, _tokens(tokens, index)
            if key not in self._blocks:
                break
            found.append((key, self._blocks[key]))
        return found

    def _touch(self, found: Chain) -> None:
        """Note that blocks are used: the last first, so that none goes before those that follow it."""
        for _, block in reversed(found):
            self._recent.move_to_end(block.number)

    def _make_room(self, wanted: int, needed: Chain) -> list[int]:
        """Places for so many blocks, or for fewer where only `needed` ones are left to go, in their order."""
        places = [self._free.popleft() for _ in range(min(wanted, len(self._free)))]
        if len(places) < wanted:
            numbers, removed = {block.number for _, block in needed}, []
            while len(places) < wanted and self._recent and next(iter(self._recent)) not in numbers:
                key = self._recent.popitem(last=False)[1]
                gone = self._blocks.pop(key)
                places.append(gone.place)
                if len(key[1]) == BLOCK:  # nobody was told of shorter ones
                    removed.append(gone.number)
                elif self._ends[key[0]] > 1:
                    self._ends[key[0]] -= 1
                else:
                    del self._ends[key[0]]
                if self._states is not None:
                    self._states.forget(gone)
            if self.events is not None and removed:
                self.events.removed(removed)
        return sorted(places)

    def _runs(self, places: Sequence[int], first: int, last: int) -> list[tuple[int, int, int]]:
        """Blocks of a row, `first` the number of the first of them and `last` the tokens of the last one, as slots of
        the row, slots of the store, and how many: what lies side by side is one run."""
        runs: list[tuple[int, int, int]] = []
        for index, place in enumerate(places, first):
            missing = 0 if index else self._lookahead  # nothing is ahead of the first token
            tokens = BLOCK if index < first + len(places) - 1 else last
            start, at, size = BLOCK * index - self._lookahead + missing, BLOCK * place + missing, tokens - missing
            if runs and sum(runs[-1][1:]) == at:
                start, at, size = runs[-1][0], runs[-1][1], runs[-1][2] + size
                runs.pop()
            runs.append((start, at, size))
        return runs


def _tokens(tokens: Sequence[int], index: int) -> tuple[int, ...]:
    """The tokens of a block."""
    return tuple(tokens[BLOCK * index : BLOCK * (index + 1)])

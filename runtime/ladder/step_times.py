"""How long a step takes here, by its rows, its nodes, the length of its rows, and what drafts the next trees: a table
(`measure_steps`), corrected by the steps that follow."""

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Any

from ...report import WHOLE

SHORT = 32  # tokens in the cache of rows that are measured
COMMON = 0.2  # share of a surprise in what all rungs have in common
OWN = 0.1  # and in the rung's own, at the first step of it; the longer it runs, the more likely the machine has changed
LESS = 0.05  # and in what drafting less saves, at the first step that does
SETTLED, SELDOM = 8, 4  # after 8 steps of one rung in a row, every fourth is looked at: to look takes time, too
FORGET = 0.995  # at each change of rung: one that is no longer chosen gets another chance
MOST_SAVED = 0.5  # share of a step of no nodes that drafting less may save
WRONG = 0.1  # a correction, as a logarithm, that is worth keeping


class StepTimes:
    """Seconds of a step: a table by rows and nodes for rows of SHORT tokens, what each further token of a row adds, to
    a step of no nodes and to one of all, and what a step saves in which less is drafted."""

    def __init__(
        self,
        rungs: Sequence[int],
        table: Mapping[int, Sequence[float]],
        slopes: tuple[float, float],
        saved: Mapping[str, Mapping[int, float]],
    ):
        """rungs: numbers of nodes, rising. table: rows -> seconds for each of the rungs. saved: what may draft in place
        of all (`report.CHEAP`, `report.NOTHING`) -> rows -> seconds."""
        self.rungs, self.slopes, self.saved = tuple(rungs), slopes, {draft: dict(of) for draft, of in saved.items()}
        # Plain lists: a choice takes a few microseconds of each step, and arrays of a few numbers are slower.
        self._slope = [slopes[0] + (slopes[1] - slopes[0]) * rung / max(self.rungs[-1], 1) for rung in self.rungs]
        self.table = {rows: [float(seconds) for seconds in times] for rows, times in sorted(table.items())}
        # Logarithms of what steps took against the table: those of so many rows alike, and each rung beyond that.
        self._common = dict.fromkeys(self.table, 0.0)
        self._own = {rows: [0.0] * len(self.rungs) for rows in self.table}
        self._last, self._alike = (0, 0), 0  # rows and rung of the last step, and how many ran so since another did
        self._drafted = WHOLE  # what the last step drafted
        self._places = {rung: place for place, rung in enumerate(self.rungs)}
        self._holding = {rows: rows for rows in self.table}  # rows of a step -> those in the table that hold them

    @property
    def draft_kinds(self) -> tuple[str, ...]:
        """What may draft, as `Session.draft_kinds`."""
        return WHOLE, *self.saved

    def seconds(self, rows: int, length: float, drafted: str = WHOLE) -> list[float]:
        """Seconds of a step of so many rows with `length` tokens each on average, for each of the rungs. drafted: what
        drafts the next trees."""
        rows = self._known(rows)
        return [*map(mul, self._expected(rows, length, drafted), map(math.exp, self._own[rows]))]

    def observe(self, rows: int, rung: int, drafted: str, length: float, seconds: float) -> None:
        """Correct the table by what a step took."""
        alike, same = self._last == (rows, rung), self._drafted == drafted
        self._last, self._alike, self._drafted = (rows, rung), self._alike + 1 if alike else 1, drafted
        if same and self._alike > SETTLED and self._alike % SELDOM:
            return
        rows, place = self._known(rows), self._places[rung]
        expected = self._expected(rows, length, drafted)[place]
        off = math.log(min(max(seconds / expected, 0.25), 4.0))
        own = self._own[rows]
        if not alike:
            own[:] = [FORGET * each for each in own]
        surprise = off - self._common[rows] - own[place]
        self._common[rows] += COMMON * surprise
        own[place] += OWN / self._alike * surprise
        if drafted != WHOLE and not same:
            saved = self.saved[drafted]
            saved[rows] = min(max(saved[rows] - LESS * surprise * expected, 0.0), MOST_SAVED * self.table[rows][0])

    @property
    def wrong(self) -> bool:
        """Whether the table has proved wrong: rungs do not relate as it says."""
        return any(max(own) - min(own) > WRONG for own in self._own.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON, corrections included."""
        table = {rows: self.seconds(rows, SHORT) for rows in self.table}
        return {"rungs": self.rungs, "table": table, "slopes": self.slopes, "saved": self.saved}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepTimes":
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError for anything else."""
        table = {int(rows): [float(seconds) for seconds in times] for rows, times in data["table"].items()}
        first, last = map(float, data["slopes"])
        saved = {
            str(draft): {int(rows): float(seconds) for rows, seconds in of.items()}
            for draft, of in data["saved"].items()
        }
        times = cls([int(rung) for rung in data["rungs"]], table, (first, last), saved)
        sound = table and all(len(row) == len(times.rungs) and min(row) > 0 for row in table.values())
        sound = sound and all(of.keys() == table.keys() for of in saved.values())
        if not sound or list(times.rungs) != sorted(set(times.rungs)):
            raise ValueError("expected a row of positive times for each number of rows")
        return times

    def _known(self, rows: int) -> int:
        """The least number of rows in the table that holds so many."""
        if rows not in self._holding:
            self._holding[rows] = min((known for known in self.table if known >= rows), default=max(self.table))
        return self._holding[rows]

    def _expected(self, rows: int, length: float, drafted: str) -> list[float]:
        """What the table says."""
        table, more = self.table[rows], rows * max(length - SHORT, 0.0)
        less = 0.0 if drafted == WHOLE else min(self.saved[drafted][rows], MOST_SAVED * table[0])
        return [seconds + more * slope - less for seconds, slope in zip(table, self._slope, strict=True)]

"""The report of a step: all that the host reads of it, a row of integers for each row of the engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

RUNNING, STOPPED, FULL, FREE = range(4)  # values of `finish`: runs on, met a stop token, is full, has no request
REASONS = {STOPPED: "stop", FULL: "length"}  # what users read of them

SCALARS = 3  # columns ahead of the lists


class Report(NamedTuple):
    """The columns in their order. D is the greatest depth of a draft tree.

    count: new tokens. finish: one of the codes above. accepted: drafted tokens that the target agreed with, before stop
    tokens and limits cut the output. tokens [D+1]: the new tokens. nodes [D+1]: the accepted path as nodes of the tree,
    the root (0) first. ranks [D+1]: each of these nodes' rank among its siblings. Entries of `tokens` from `count` on,
    and of `nodes` and `ranks` past `accepted`, mean nothing.
    """

    count: Any
    finish: Any
    accepted: Any
    tokens: Any
    nodes: Any
    ranks: Any

    @classmethod
    def split(cls, row: Sequence[Any]) -> "Report":
        """A row of 3 + 3 * (D + 1) integers -> its columns; those of an array are views of it."""
        length = (len(row) - SCALARS) // (len(cls._fields) - SCALARS)
        lists = (row[start : start + length] for start in range(SCALARS, len(row), length))
        return cls(*row[:SCALARS], *lists)


class AcceptedNode(NamedTuple):
    """A drafted token that the target agreed with: its node in the tree, from 1 on, in a dynamic tree the place of its
    score among all; and its rank among the children of its parent, 0 the first choice."""

    node: int
    rank: int


AcceptedPath = tuple[AcceptedNode, ...]  # the drafted tokens that a step accepted, the root's child first


class RowReport(NamedTuple):
    """What one step did to one row: its new tokens, its finish code, and the path that the target agreed with."""

    tokens: list[int]
    finish: int
    path: AcceptedPath

    @classmethod
    def read(cls, row: Sequence[int]) -> "RowReport":
        """A row of the report, as a list."""
        report = Report.split(row)
        path = zip(report.nodes[1 : report.accepted + 1], report.ranks[1 : report.accepted + 1], strict=True)
        return cls(list(report.tokens[: report.count]), report.finish, tuple(AcceptedNode(*pair) for pair in path))

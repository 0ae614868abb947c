"""The report of a step: all that the host reads of it, a row of integers for each row of the engine."""

from typing import Any, NamedTuple

from numpy import int64
from numpy.typing import NDArray

from .controls import TOP_LOGPROBS

RUNNING, STOPPED, FULL, FREE = range(4)  # values of `finish`: runs on, met a stop token, is full, has no request
REASONS = {STOPPED: "stop", FULL: "length"}  # what users read of them

SCALARS = 4  # columns ahead of the lists
SIZES = (1, 1, 1, 1, TOP_LOGPROBS, TOP_LOGPROBS)  # integers that each list has for a token
LOGPROB_STEPS = 2**20  # a log-probability is reported as an integer, in steps of 1 / LOGPROB_STEPS
LEAST_LOGPROB = -1e4  # stands for -inf
SCORE_STEPS = 2**20  # a score, a probability, is reported in steps of 1 / SCORE_STEPS

# What drafts the trees of a step's rows: all scorers, those that do not pause, or none of them.
WHOLE, CHEAP, NOTHING = "whole", "cheap", "nothing"


class Report(NamedTuple):
    """The columns in their order. D is the greatest depth of a draft tree, L = D + 1, N = TOP_LOGPROBS.

    Entries of `tokens` from `count` on, of `nodes` past `accepted + 1` and of `ranks` past `accepted`, mean nothing.
    """

    count: Any  # new tokens
    finish: Any  # one of the codes above
    accepted: Any  # drafted tokens that the target agreed with, before stop tokens and limits cut the output
    scored: Any  # how many scores follow
    # [drafts]: of each node of the tree that the next step verifies, but the root, the probability that the drafter
    # gives its acceptance
    scores: Any
    tokens: Any  # [L]: the new tokens
    # [L]: the accepted path as nodes of the tree, the root (0) first, then the node that the target would have agreed
    # with next, had the step verified it; 0: none. A chain 0-1-2 of which one node is verified and accepted, and
    # whose node 2 has the token that the target says next: [0, 1, 2].
    nodes: Any
    ranks: Any  # [L]: each of these nodes' rank among its siblings
    logprobs: Any  # [L]: those of the new tokens, of rows that asked for them
    top_tokens: Any  # [L * N]: the likeliest tokens in their places
    top_logprobs: Any  # [L * N]: theirs

    @classmethod
    def split(cls, row: NDArray[int64]) -> "Report":
        """A row of 4 + scored + L * (4 + 2 * N) integers -> its columns; the lists are views of it."""
        scalars = row[:SCALARS].tolist()
        start = SCALARS + scalars[-1]
        length, lists = _most_tokens(row, start), [row[SCALARS:start]]
        for size in SIZES:
            lists.append(row[start : start + size * length])
            start += size * length
        return cls(*scalars, *lists)


class DraftedTree(NamedTuple):
    """The tree that a row's next step verifies: its tokens, the root's first, and the index of each one's parent, -1
    for the root and for a place without a node. A node comes after its parent."""

    tokens: list[int]
    parents: list[int]

    def children(self) -> list[list[int]]:
        """Of each node its children."""
        found: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if node and parent >= 0:
                found[parent].append(node)
        return found


class AcceptedNode(NamedTuple):
    """A drafted token that the target agreed with: its node in the tree, from 1 on, in a dynamic tree the place of its
    score among all; and its rank among the children of its parent, 0 the first choice."""

    node: int
    rank: int


AcceptedPath = tuple[AcceptedNode, ...]  # the drafted tokens that a step accepted, the root's child first


class TokenLogprobs(NamedTuple):
    """A token's log-probability in the model's own distribution, among what a grammar or a mask allows there, before
    temperature and all else that a request asks for; and `top`, the likeliest tokens in its place with theirs, the
    likeliest first, without those that cannot be."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RowReport(NamedTuple):
    """What one step did to one row."""

    tokens: list[int]  # the new ones
    finish: int  # one of the codes above
    path: AcceptedPath  # the drafts that the target agreed with
    missed: int  # the node that follows the path in the drafted tree but was not verified; 0: none
    scores: list[int]  # of the nodes that the step drafted, see `Report`
    logprobs: list[TokenLogprobs]  # of the new tokens, where the row asked for them

    @classmethod
    def read(cls, row: NDArray[int64], alternatives: int = -1) -> "RowReport":
        """A row of the report. alternatives: how many likely tokens are wanted beside each new one, -1 for no
        log-probabilities."""
        scored = int(row[SCALARS - 1])
        length = _most_tokens(row, SCALARS + scored)
        count, finish, accepted, _, *lists = row[: SCALARS + scored + 3 * length].tolist()
        scores, lists = lists[:scored], lists[scored:]
        tokens, nodes, ranks = lists[:count], lists[length : 2 * length], lists[2 * length :]
        path = zip(nodes[1 : accepted + 1], ranks[1 : accepted + 1], strict=True)
        logprobs = _logprobs(Report.split(row), tokens, alternatives) if alternatives >= 0 else []
        missed = sum(nodes[accepted + 1 : accepted + 2])  # none below the deepest
        return cls(tokens, finish, tuple(AcceptedNode(*pair) for pair in path), missed, scores, logprobs)


def _most_tokens(row: NDArray[int64], start: int) -> int:
    """L of a row of the report, whose lists for tokens begin at `start`."""
    return (len(row) - start) // sum(SIZES)


def _logprobs(report: Report, tokens: list[int], alternatives: int) -> list[TokenLogprobs]:
    """Those of the new tokens, each with so many of the likeliest."""
    found, least = [], LEAST_LOGPROB * LOGPROB_STEPS  # and of logits that are no numbers, whose integers are anything
    for place, (token, own) in enumerate(zip(tokens, report.logprobs, strict=False)):
        likeliest = slice(place * TOP_LOGPROBS, place * TOP_LOGPROBS + alternatives)
        ids, values = report.top_tokens[likeliest].tolist(), report.top_logprobs[likeliest].tolist()
        top = ((each, value / LOGPROB_STEPS) for each, value in zip(ids, values, strict=True) if value > least)
        found.append(TokenLogprobs(token, max(int(own), least) / LOGPROB_STEPS, tuple(top)))
    return found

"""Conversations over many replicas: who asks, who is asked, and what came of it."""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from .replica import Call, Replica
from .speed import Speed

Choose = Callable[["Fleet", Call], int]


@dataclass(frozen=True)
class Load:
    """Conversations that begin at random. answers_s: of all turns, for each replica. first, further: tokens of the
    first question and of each later one, before which the conversation so far stands. think_s: from an answer to the
    next question, on average."""

    answers_s: float
    turns: int = 4
    first: int = 120
    further: int = 60
    answer: int = 128
    think_s: float = 5.0


@dataclass
class Fleet:
    """Replicas, and what a router knows of them. home: the replica that had a conversation's last turn."""

    replicas: list[Replica]
    chance: random.Random
    home: dict[int, int] = field(default_factory=dict)

    def fewer_of_two(self) -> int:
        """Of two replicas at random, the one with fewer calls."""
        some = [self.chance.randrange(len(self.replicas)) for _ in range(2)]
        return min(some, key=lambda index: self.replicas[index].outstanding)


def at_random(fleet: Fleet, call: Call) -> int:
    """As a balancer that knows nothing."""
    return fleet.chance.randrange(len(fleet.replicas))


def fewer_of_two(fleet: Fleet, call: Call) -> int:
    """As Ray Serve does unless it is told otherwise."""
    return fleet.fewer_of_two()


def by_prefix(fleet: Fleet, call: Call) -> int:
    """Where the conversation was, unless another has far fewer calls."""
    other, home = fleet.fewer_of_two(), fleet.home.get(call.conversation)
    if home is None or not fleet.replicas[home].kept.get(call.conversation):
        return other
    ahead = fleet.replicas[home].outstanding - fleet.replicas[other].outstanding
    return other if ahead > IMBALANCE else home


IMBALANCE = 8  # calls that a replica may have more than another before a conversation leaves it
POLICIES: dict[str, Choose] = {"at random": at_random, "fewer of two": fewer_of_two, "by prefix": by_prefix}


@dataclass
class Outcome:
    """Of the calls that came after the warm-up: seconds to the first tokens; for each replica and second: answers,
    tokens written, prompt tokens asked and prefilled, chunks."""

    first_s: list[float]
    answers: float
    written: float
    asked: float
    prefilled: float
    chunks: float


def simulate(speed: Speed, load: Load, replicas: int, choose: Choose, most_kept: float, rows: int, seconds: float,
             warm_s: float = 60.0, seed: int = 0) -> Outcome:  # fmt: skip
    """Run so many seconds after the warm-up."""
    chance = random.Random(seed)
    fleet = Fleet([Replica(speed, rows, most_kept) for _ in range(replicas)], chance)
    numbers, order, end = count(), count(), warm_s + seconds
    rate = load.answers_s * replicas / load.turns
    events: list[tuple[float, int, Call | None, int, int]] = [(chance.expovariate(rate), next(order), None, -1, 0)]
    calls: list[Call] = []
    before: list[float] = []

    def plan(index: int) -> None:
        replica = fleet.replicas[index]
        if replica.until < end:
            heapq.heappush(events, (replica.until, next(order), None, index, replica.stretch))

    while events and events[0][0] < end:
        now, _, call, index, stretch = heapq.heappop(events)
        if now >= warm_s and not before:
            before = _counts(fleet.replicas)
        if call is None and index < 0:  # a conversation begins
            heapq.heappush(events, (now + chance.expovariate(rate), next(order), None, -1, 0))
            call = Call(next(numbers), load.first, load.answer, now)
        if call is not None:  # a question is asked
            index = choose(fleet, call)
            fleet.home[call.conversation] = index
            if now >= warm_s:
                calls.append(call)
            known = fleet.replicas[index].stretch
            fleet.replicas[index].submit(call, now)
            if fleet.replicas[index].stretch != known:
                plan(index)
        elif fleet.replicas[index].stretch == stretch:
            for done in fleet.replicas[index].advance():
                if done.turn + 1 < load.turns:
                    again = now + chance.expovariate(1 / load.think_s)
                    prompt = done.prompt + done.answer + load.further
                    heapq.heappush(events, (again, next(order), Call(done.conversation, prompt, load.answer, again,
                                                                    done.turn + 1), -2, 0))  # fmt: skip
                else:
                    del fleet.home[done.conversation]
            plan(index)
    after = _counts(fleet.replicas)
    answers, written, asked, prefilled, chunks = (
        (new - old) / replicas / seconds for new, old in zip(after, before, strict=True)
    )
    waits = [(call.first if call.first is not None else end) - call.asked for call in calls]
    return Outcome(waits, answers, written, asked, prefilled, chunks)


def _counts(replicas: Iterable[Replica]) -> list[float]:
    """What all have done so far."""
    each = [(one.answers, one.written, one.asked, one.prefilled, one.chunks) for one in replicas]
    return [sum(column) for column in zip(*each, strict=True)]

"""Say where the time of a step goes, for people."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..runtime.inductor.profile import Part, Profile

SMALL = 0.01  # share of a step: what stays below it everywhere has no line of its own
LABEL = 50  # columns


class TableRow(NamedTuple):
    """A line of the table: what it is about, and its parts in each profile."""

    label: str
    parts: "list[list[Part]]"

    @property
    def calls(self) -> int:
        return sum(part.calls for part in self.parts[0])

    @property
    def seconds(self) -> list[float]:
        return [sum(part.seconds for part in parts) for parts in self.parts]

    @property
    def read(self) -> list[int | None]:
        """Bytes of weights and caches, None where a part does not say how many."""
        known = [[part.read for part in parts if part.read is not None] for parts in self.parts]
        return [sum(read) if len(read) == len(parts) else None for read, parts in zip(known, self.parts, strict=True)]

    def split(self, label: "Callable[[Part], str]") -> "list[TableRow]":
        """A row for each label of its parts, what takes longest anywhere first."""
        labels = dict.fromkeys(label(part) for parts in self.parts for part in parts)
        rows = [
            TableRow(name, [[part for part in parts if label(part) == name] for parts in self.parts]) for name in labels
        ]
        return sorted(rows, key=lambda row: -max(row.seconds))


def describe(title: str, profiles: "Sequence[Profile]") -> str:
    """A line for each profile, and a table: stages, ops, and the places of each op, with a group of columns for each
    profile. All profiles are of one engine, with the same rows."""
    first = profiles[0]
    title += f"; {_count(first.rows, 'row')}, {_count(first.threads, 'thread')}"
    return "\n".join([title, *map(summary, profiles), "", *_table(profiles)])


def summary(profile: "Profile") -> str:
    """What a step takes, beside one read of its weights."""
    times, speed = profile.step_s / profile.read_s, profile.weights / profile.read_s / 1e9
    return (
        f"{profile.tokens} tokens in the cache: {profile.step_s * 1e3:.2f} ms a step, {times:.2f} times one read of its"
        f" weights ({profile.weights / 1e6:.1f} MB in {profile.read_s * 1e3:.2f} ms, {speed:.1f} GB/s)"
    )


def stage_rows(profiles: "Sequence[Profile]") -> list[TableRow]:
    """The stages of a step that there are, in their order."""
    order = list(profiles[0].stages())
    return sorted(_whole(profiles).split(lambda part: part.stage), key=lambda row: order.index(row.label))


def op_rows(profiles: "Sequence[Profile]") -> tuple[list[tuple[TableRow, list[TableRow]]], int]:
    """Each op with its places, where it has several; small ones are left out -> and how many ops were."""
    ops = _whole(profiles).split(lambda part: part.op)
    large = [op for op in ops if _is_large(op, profiles)]
    return [(op, _places(op, profiles)) for op in large], len(ops) - len(large)


def _whole(profiles: "Sequence[Profile]") -> TableRow:
    return TableRow("", [list(profile.parts) for profile in profiles])


def _places(op: TableRow, profiles: "Sequence[Profile]") -> list[TableRow]:
    places = op.split(lambda part: f"{part.stage} {part.place}".rstrip())
    return [place for place in places if len(places) > 1 and _is_large(place, profiles)]


def _is_large(row: TableRow, profiles: "Sequence[Profile]") -> bool:
    return any(each >= SMALL * profile.recorded_s for each, profile in zip(row.seconds, profiles, strict=True))


def _table(profiles: "Sequence[Profile]") -> Iterator[str]:
    yield f"{'':{LABEL + 6}}" + "".join(f"{f'{profile.tokens} tokens':>22}" for profile in profiles)
    yield f"{'':{LABEL}}{'calls':>6}" + f"{'ms':>8}{'share':>7}{'GB/s':>7}" * len(profiles)
    for stage in stage_rows(profiles):
        yield f"{stage.label:{LABEL}}{'':6}{_cells(stage, profiles, speed=False)}"
    ops, left_out = op_rows(profiles)
    yield ""
    for op, places in ops:
        yield f"{op.label:{LABEL}}{op.calls:6}{_cells(op, profiles)}"
        for place in places:
            yield f"  {place.label:{LABEL - 2}.{LABEL - 2}}{place.calls:6}{_cells(place, profiles)}"
    if left_out:
        yield f"and {_count(left_out, 'op')} below {SMALL:.0%}"


def _cells(row: TableRow, profiles: "Sequence[Profile]", speed: bool = True) -> str:
    cells = []
    for seconds, read, profile in zip(row.seconds, row.read, profiles, strict=True):
        reached = f"{read / seconds / 1e9:.1f}" if speed and read is not None and seconds else ""
        cells.append(f"{seconds * 1e3:8.2f}{seconds / profile.recorded_s:7.1%}{reached:>7}")
    return "".join(cells).rstrip()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""From single answers to the table: medians over the repeats, ratios, and how many texts drafts change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from .engines import Contender
from .turns import Measured

# The first that ran is what the others are compared with.
BASELINES = ("llama.cpp bf16", "llama.cpp the file", "transformers bf16")


@dataclass(frozen=True)
class SummaryRow:
    """One engine's line. tokens_s: while it decodes; whole_s: prompt included; prompt_s: prompt tokens a second.

    Each is tokens over seconds of all questions, a question's seconds the median of its repeats. slowest, fastest:
    tokens_s of single repeats. per_step: tokens that a pass brings. changed: questions whose text is not that of its
    plain engine, None for a plain one or where that did not run. other_cores: what other work took, on average."""

    contender: Contender
    tokens_s: float
    slowest: float
    fastest: float
    whole_s: float
    prompt_s: float
    per_step: float | None
    changed: int | None
    questions: int
    other_cores: float

    @property
    def name(self) -> str:
        return self.contender.name


def summarize(contenders: Sequence[Contender], found: Sequence[Measured]) -> list[SummaryRow]:
    """A row for each engine that answered, in the order of the table."""
    groups = {c.name: [one for one in found if one.engine == c.name] for c in contenders}
    return [_row(c, groups[c.name], _plain(c, groups)) for c in contenders if groups[c.name]]


def changed(expected: Mapping[Any, Any], got: Mapping[Any, Any]) -> list[Any]:
    """The questions whose text differs. Both: a question's id -> its text or tokens."""
    return [question for question, text in got.items() if expected[question] != text]


def baseline(rows: Sequence[SummaryRow]) -> SummaryRow:
    """What the others are compared with."""
    named = {row.name: row for row in rows}
    return next((named[name] for name in BASELINES if name in named), rows[0])


def _plain(contender: Contender, groups: dict[str, list[Measured]]) -> list[Measured] | None:
    """The answers of the same engine without drafts."""
    if contender.drafts == "none":
        return None
    return groups.get(Contender(contender.family, contender.weights, "none").name)


def _row(contender: Contender, answers: list[Measured], plain: list[Measured] | None) -> SummaryRow:
    repeats = sorted({one.repeat for one in answers})
    speeds = [_speed([one for one in answers if one.repeat == repeat]) for repeat in repeats]
    steps = [one.steps for one in answers]
    return SummaryRow(
        contender,
        _speed(answers),
        min(speeds),
        max(speeds),
        _over(answers, "new_tokens", "seconds"),
        _over(answers, "prompt_tokens", "prompt_s"),
        sum(one.decoded for one in answers) / max(sum(filter(None, steps)), 1) if None not in steps else None,
        len(changed(_texts(plain), _texts(answers))) if plain else None,
        len({one.question for one in answers}),
        mean(one.other_cores for one in answers),
    )


def _texts(answers: Sequence[Measured]) -> dict[str, str]:
    """The first answer to each question."""
    return {one.question: one.text for one in answers if one.repeat == 0}


def _speed(answers: Sequence[Measured]) -> float:
    return _over(answers, "decoded", "decode_s")


def _over(answers: Sequence[Measured], counted: str, seconds: str) -> float:
    """Something a second: its sum over the sum of the questions' median seconds."""
    by_question: dict[str, list[Measured]] = {}
    for one in answers:
        by_question.setdefault(one.question, []).append(one)
    amount = sum(getattr(ones[0], counted) for ones in by_question.values())
    taken = sum(median(getattr(one, seconds) for one in ones) for ones in by_question.values())
    return float(amount / max(taken, 1e-9))


def table(rows: Sequence[SummaryRow]) -> str:
    """As Markdown."""
    base = baseline(rows)
    speeds = {row.name: row.tokens_s for row in rows}
    head = (
        f"| engine | weights | drafts | tokens/s | of single repeats | over {base.name} | over its plain engine | "
        "tokens per step | prompt included, tokens/s | prompt, tokens/s | texts changed by drafts |"
    )
    lines = [head, "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        c = row.contender
        plain = speeds.get(Contender(c.family, c.weights, "none").name)
        cells = [
            c.family, c.weights, c.drafts, f"{row.tokens_s:.0f}", f"{row.slowest:.0f} to {row.fastest:.0f}",
            f"{row.tokens_s / base.tokens_s:.2f}",
            f"{row.tokens_s / plain:.2f}" if plain and c.drafts != "none" else "",
            f"{row.per_step:.2f}" if row.per_step else "", f"{row.whole_s:.0f}", f"{row.prompt_s:.0f}",
            "" if row.changed is None else f"{row.changed} of {row.questions}",
        ]  # fmt: skip
        bold = c.family == "specstep" and row.tokens_s == max(speeds.values())
        lines.append("| " + " | ".join(f"**{cell}**" if bold and cell else cell for cell in cells) + " |")
    return "\n".join(lines) + "\n"

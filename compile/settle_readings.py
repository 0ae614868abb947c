"""Before anything is compiled: a drafter whose publisher leaves something open is right in one way only. Which one,
its drafts say."""

import statistics
from collections.abc import Sequence

from ..graphs.drafters.drafter import Unsaid
from ..graphs.drafters.merged import parts
from ..graphs.kept import UnsupportedModel
from ..graphs.step import SpeculativeStep
from ..progress import OnProgress
from .assemble import Assembled
from .source import Source
from .try_drafts import accepted_drafts, tokens_per_step


def settle_readings(source: Source, graphs: Assembled, device: str, progress: OnProgress) -> None:
    """Decide in which way each drafter is read whose publisher leaves it open, by what is accepted of its drafts of a
    short text, and report that in one line each. A second way must be plainly better: it is the rarer one."""
    step = graphs.step.module
    assert isinstance(step, SpeculativeStep)
    open_ones = [unsaid for scorer in parts(step.drafter.scorer) for unsaid in scorer.unsaid()]
    if not open_ones or step.drafter.nodes == 0:
        return
    best = accepted_drafts(source, graphs, device)
    for unsaid in open_ones:
        if not _swapped(step, unsaid):
            continue
        other = accepted_drafts(source, graphs, device)
        rates = f"{tokens_per_step(best):.1f} tokens per step, with {unsaid.other} {tokens_per_step(other):.1f}"
        taken = _is_better(other, best)
        if taken:
            best = other
        else:
            _swapped(step, unsaid)
        progress(f"drafter: its config leaves {unsaid.usual} open: {rates}; taken as {unsaid[taken]}")


def _swapped(step: SpeculativeStep, unsaid: Unsaid) -> bool:
    """Take a drafter in the other way; not in one that needs hidden states which the target cannot give."""
    unsaid.swap()
    try:
        step.target.read_features(step.drafter.scorer.feature_layers)
    except UnsupportedModel:
        unsaid.swap()
        return False
    return True


def _is_better(other: Sequence[int], usual: Sequence[int]) -> bool:
    """Whether more is accepted in steps of another reading: by more than twice the standard error of the difference,
    and enough that it is no accident."""
    error = sum((statistics.pvariance(told) + 1 / len(told)) / len(told) for told in (other, usual)) ** 0.5
    return tokens_per_step(other) - tokens_per_step(usual) > 2 * error and tokens_per_step(other) > 1.25

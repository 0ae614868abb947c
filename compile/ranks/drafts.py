"""Draft models that the ranks share, as they share the target."""

from ...errors import BuildError
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.drafter import Scorer
from ...graphs.drafters.merged import parts
from ...graphs.parts import LinearOfParts
from .parts import Cut, cut_rows

FIELD = "draft_ranks"


def cut_drafters(scorer: Scorer, ranks: int) -> tuple[Cut, ...]:
    """Cut a scorer's draft models into so many parts, in place, in the order of their caches; nothing for 1. Raises
    BuildError where there is none, or one that cannot be cut."""
    if ranks == 1:
        return ()
    models = [part.model.model for part in parts(scorer) if isinstance(part, DraftModel)]
    if not models:
        raise BuildError(f"{FIELD}: expected 1 with this drafter, of which each rank has all, got {ranks}; a draft "
                         "model takes more")  # fmt: skip
    if any(isinstance(module, LinearOfParts) for model in models for module in model.modules()):
        raise BuildError(f"{FIELD}: expected 1 with early-exit, whose layers are the target's, got {ranks}")
    return tuple(cut_rows(model, ranks, FIELD) for model in models)

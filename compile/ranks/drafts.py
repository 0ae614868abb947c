"""Draft models that the ranks share, as they share the target."""

from ...errors import BuildError
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.drafter import Scorer
from ...graphs.drafters.merged import parts
from ...graphs.parts import LinearOfParts
from .parts import Cut, cut_rows

FIELD = "draft_ranks"


def draft_models(scorer: Scorer) -> list[DraftModel]:
    """The draft models of a scorer, in the order of their caches."""
    return [part for part in parts(scorer) if isinstance(part, DraftModel)]


def cut_drafters(scorer: Scorer, ranks: int) -> tuple[Cut, ...]:
    """Cut a scorer's draft models into so many parts, in place; nothing for 1. Raises BuildError where there is none,
    or one that cannot be cut."""
    if ranks == 1:
        return ()
    models = [draft.model.model for draft in draft_models(scorer)]
    if not models:
        raise BuildError(f"{FIELD}: expected 1 with this drafter, of which each rank has all, got {ranks}; a draft "
                         "model takes more")  # fmt: skip
    if any(isinstance(module, LinearOfParts) for model in models for module in model.modules()):
        raise BuildError(f"{FIELD}: expected 1 with early-exit, whose layers are the target's, got {ranks}")
    return tuple(cut_rows(model, ranks, FIELD) for model in models)

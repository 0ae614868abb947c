"""What every backend hands back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..runtime.engine_file import ProgramSpec


@dataclass(frozen=True)
class Lowered:
    """What a backend made of the graphs, its files written: the programs, the stages of the step (see `stage_shares`),
    and what a machine needs to run them (see `engine_file.check_machine`). drafts_may_change: why drafts may change a
    text, where something is computed in another way beside others; empty where they change none. details: more of what
    the manifest says about the engine."""

    programs: dict[str, ProgramSpec]
    stages: dict[str, dict[str, int]]
    requires: dict[str, Any]
    versions: dict[str, str]
    drafts_may_change: list[str]
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

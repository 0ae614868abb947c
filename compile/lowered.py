"""What every backend hands back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..runtime.engine_file import ProgramSpec


@dataclass(frozen=True)
class Lowered:
    """What a backend made of the graphs, its files written."""

    programs: dict[str, ProgramSpec]  # name -> file, inputs, outputs and constants
    stages: dict[str, dict[str, int]]  # stage of the step -> its graph nodes and parameters, see `stage_shares`
    requires: dict[str, Any]  # what a machine must offer, compared with the runner's `machine()` at load
    versions: dict[str, str]  # package -> version that lowered it
    drafts_may_change: list[str]  # why drafts may change a text; empty: they change none
    details: dict[str, Any] = dataclasses.field(default_factory=dict)  # further fields of the manifest about the engine

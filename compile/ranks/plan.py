"""Which layers of a model can be cut into parts: transformers' plan for it, read as the names of its modules."""

import re
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...errors import BuildError

ROWS = ("rowwise", "rowwise_split_input")  # whose inputs are cut
COLUMNS = ("colwise", "colwise_gather_output")  # whose outputs are


class CutPlan(NamedTuple):
    """Names of modules. rows, columns: linear layers whose inputs are cut, and whose outputs are; experts: mixtures,
    whose experts all have a share of their inner width in each part."""

    rows: list[str]
    columns: list[str]
    experts: list[str]


def read_plan(model: PreTrainedModel, field: str) -> CutPlan:
    """The plan that transformers has for a model. field: the build option that asks for it, for errors. Raises
    BuildError where there is none."""
    patterns: dict[str, str] = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    mixtures = [name for name, module in model.named_modules() if hasattr(module, "is_transposed")]
    plan = CutPlan(
        [name for name in linears if _styled(patterns, name, ROWS)],
        [name for name in linears if _styled(patterns, name, COLUMNS)],
        [name for name in mixtures if _styled(patterns, name, ("moe_tp_experts",))],
    )
    if not plan.rows and not plan.experts:
        raise BuildError(
            f"{field}: expected a model that transformers can cut into parts (base_model_tp_plan), got "
            f"{type(model).__name__}, for which it has no such plan; leave the option out"
        )
    for name in plan.experts:
        _check_experts(model.get_submodule(name), type(model).__name__, field)
    return plan


def _styled(patterns: dict[str, str], name: str, styles: tuple[str, ...]) -> bool:
    """Whether the plan gives a module one of these styles. It has names in the base model, with * for numbers."""
    known = [re.escape(pattern).replace(r"\*", r"\d+") for pattern, style in patterns.items() if style in styles]
    return any(re.search(rf"(^|\.){pattern}$", name) for pattern in known)


def _check_experts(experts: Any, name: str, field: str) -> None:
    """Raises BuildError for what `ExpertsOfParts` would compute otherwise."""
    has_norm = getattr(experts, "has_post_expert_norm", False)  # older transformers have none
    if experts.is_transposed or experts.has_bias or has_norm or not experts.has_gate:
        raise BuildError(
            f"{field}: expected experts of a gate, a product up and a product down, got {name}, whose experts have "
            "more; leave the option out"
        )

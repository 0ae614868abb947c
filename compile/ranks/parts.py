"""A model whose rowwise layers are sums of parts, on one device."""

import copy
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...graphs.parts import ExpertsOfParts, LinearOfParts
from .plan import CutPlan, read_plan
from .slices import OutputBlock, Slices


class Cut(NamedTuple):
    """How a model was cut."""

    plan: CutPlan
    slices: Slices


def cut_rows(model: PreTrainedModel, parts: int, field: str) -> Cut:
    """Replace the rowwise layers of a model, in place, by sums of so many parts over slices of their inputs, see
    `Slices.cut`. field: the build option that asks for it. Raises BuildError for a model that cannot be cut so."""
    plan, slices = read_plan(model, field), Slices(field)
    for name in plan.rows:
        linear: Any = model.get_submodule(name)
        weights = slices.cut(linear.weight.detach(), parts, f"{type(model).__name__}'s {name}")
        bias = None if linear.bias is None else linear.bias.detach()
        model.set_submodule(name, LinearOfParts(weights, bias))
    for name in plan.experts:
        experts: Any = model.get_submodule(name)
        narrow = narrow_experts(experts, parts, slices, f"{type(model).__name__}'s {name}")
        model.set_submodule(name, ExpertsOfParts(narrow))
    return Cut(plan, slices)


def narrow_experts(experts: Any, parts: int, slices: Slices, name: str) -> list[nn.Module]:
    """Modules like experts with an equal share of their inner width each."""
    down = slices.cut(experts.down_proj.detach(), parts, f"{name}.down_proj")
    gate_up = experts.gate_up_proj.detach()
    narrow, shared = [], {id(each): each for each in (experts.config, *experts.parameters())}
    for part, weight in enumerate(down):
        one = copy.deepcopy(experts, dict(shared))  # with hooks of its own
        one.gate_up_proj = frozen(slices.rows_of(gate_up, [OutputBlock(gate_up.shape[1] // 2, parts, part)] * 2))
        one.down_proj = frozen(weight)
        narrow.append(one)
    return narrow


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)

"""Experts of modules for multi-token prediction: publishers write one by one what transformers has in one tensor."""

import re
from collections.abc import Collection

import torch
from torch import Tensor

EXPERTS = "layer.mlp.experts."
SINGLE_EXPERT = rf"{re.escape(EXPERTS)}(\d+)\.(gate|up|down)_proj\.weight"
UNGATED = r"(layer\.\d+\.mixer\.experts\.)(\d+)\.(up|down)_proj\.weight"


def joined_name(name: str) -> str:
    """The name of the tensor that has those of all experts, for a single one's; any other name as it is."""
    if match := re.fullmatch(SINGLE_EXPERT, name):
        return f"{EXPERTS}{'down' if match[2] == 'down' else 'gate_up'}_proj"
    return re.sub(UNGATED, r"\1\3_proj", name)


def with_joined_experts(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors with those of single experts in one, where that is what is wanted and none is missing."""
    tensors = _with_ungated_experts(tensors, wanted)
    parts = [re.fullmatch(SINGLE_EXPERT, name) for name in tensors]
    found = {(int(part[1]), part[2]): tensors[part[0]] for part in parts if part}
    count = 1 + max((number for number, _ in found), default=-1)
    if f"{EXPERTS}gate_up_proj" not in wanted or len(found) != 3 * count or count == 0:
        return tensors
    joined = {
        f"{EXPERTS}gate_up_proj": torch.stack([torch.cat([found[i, "gate"], found[i, "up"]]) for i in range(count)]),
        f"{EXPERTS}down_proj": torch.stack([found[i, "down"] for i in range(count)]),
    }
    single = {part[0] for part in parts if part}
    return {name: tensor for name, tensor in tensors.items() if name not in single} | joined


def _with_ungated_experts(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The same of experts without a gate."""
    parts = [part for name in tensors if (part := re.fullmatch(UNGATED, name))]
    found = {(f"{part[1]}{part[3]}_proj", int(part[2])): tensors[part[0]] for part in parts}
    joined = {}
    for name in sorted({name for name, _ in found} & set(wanted)):
        numbers = sorted(number for known, number in found if known == name)
        if numbers == list(range(len(numbers))):
            joined[name] = torch.stack([found[name, number] for number in numbers])
    single = {part[0] for part in parts if f"{part[1]}{part[3]}_proj" in joined}
    return {name: tensor for name, tensor in tensors.items() if name not in single} | joined

"""Modules for multi-token prediction that lie in the target's own checkpoint, as each publisher names them."""

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import BuildError
from ...graphs.drafters.mtp import MtpHead
from ...graphs.drafters.recurrent import Recurrent
from ...graphs.kept import kept_by
from ..config import EngineConfig
from ..locate import local
from ..source import Source
from .published import config_of, fill, read_some, read_tensors, tensor_names


class Layout(NamedTuple):
    """How a publisher names a module. prefix: of its tensors, in which LAYER is the number of the target's layers;
    names: pairs of a published name and ours, a regular expression and a template; what none of them fits is the
    layer's. hidden_first: the projection takes the hidden state ahead of the embedding."""

    prefix: str
    names: tuple[tuple[str, str], ...]
    hidden_first: bool = False


LAYOUTS = {
    "DeepSeek-V3, GLM-4.5": Layout(r"model\.layers\.LAYER\.", (
        (r"(enorm|hnorm|embed_tokens)\.weight", r"\1.weight"), (r"eh_proj\.(\w+)", r"proj.\1"),
        (r"shared_head\.norm\.weight", "norm.weight"), (r"shared_head\.head\.weight", "lm_head.weight"),
    )),
    "MiMo": Layout(r"(?:model\.)?mtp_layers\.0\.", (
        (r"token_layernorm\.weight", "enorm.weight"), (r"hidden_layernorm\.weight", "hnorm.weight"),
        (r"input_proj\.(\w+)", r"proj.\1"), (r"final_layernorm\.weight", "norm.weight"),
    ), hidden_first=True),
    "Ernie 4.5": Layout(r"model\.mtp_(?=[a-z_]+\.0\.)", (
        (r"emb_norm\.0\.weight", "enorm.weight"), (r"hidden_norm\.0\.weight", "hnorm.weight"),
        (r"linear_proj\.0\.(\w+)", r"proj.\1"), (r"block\.0\.(.*)", r"layer.\1"),
    )),
    "Qwen3-Next": Layout(r"mtp\.", (
        (r"pre_fc_norm_embedding\.weight", "enorm.weight"), (r"pre_fc_norm_hidden\.weight", "hnorm.weight"),
        (r"fc\.(\w+)", r"proj.\1"), (r"norm\.weight", "norm.weight"), (r"layers\.0\.(.*)", r"layer.\1"),
    )),
}  # fmt: skip
SPECULATORS = LAYOUTS["MiMo"]._replace(hidden_first=False)  # of the type mtp, in a directory of its own
FURTHER = r"(?:.*\.)?mtp(?:\.layers|_\w+)\.[1-9]\d*\..*"  # modules behind the first
EXPERTS = "layer.mlp.experts."
SINGLE_EXPERT = rf"{re.escape(EXPERTS)}\d+\.(gate|up|down)_proj\.weight"
NAME = "mtp"  # of the drafter


def load_mtp(target: Source, config: EngineConfig) -> Recurrent:
    """The module in the target's checkpoint -> its scorer, in the engine's dtype and on its device. Raises BuildError
    where there is none, and for every tensor of it that does not fit."""
    folder = str(_folder(target))
    layout, own = _module(target, folder)
    tensors = {own[name]: tensor for name, tensor in read_some(folder, own).items()}
    return _scorer(NAME, target, config, layout, tensors)


def is_mtp_speculator(name: str) -> bool:
    """Whether a path is a module for a target that lies apart from it, as speculators writes it."""
    return (config_of(name) or {}).get("speculators_model_type") == "mtp"


def load_mtp_speculator(name: str, target: Source, config: EngineConfig) -> Recurrent:
    """The same of such a path. Raises BuildError."""
    data = config_of(name) or {}
    modules = data.get("num_nextn_predict_layers", 1)
    if modules != 1:
        raise BuildError(f"drafter: {name}: config.json: num_nextn_predict_layers: expected 1, got {modules!r}")
    tensors = {_own_name(key, SPECULATORS, 0) or key: value for key, value in read_tensors(name).items()}
    if missing := {"proj.weight", "enorm.weight", "hnorm.weight", "norm.weight"} - set(tensors):
        raise BuildError(f"drafter: {name}: tensors do not fit: missing {', '.join(sorted(missing))}")
    return _scorer(name, target, config, SPECULATORS, tensors)


def has_module(target: Source) -> bool:
    """Whether the target's checkpoint has one module whose layer has the tensors of one of the target's."""
    try:
        _, own = _module(target, str(_folder(target)))
    except (BuildError, OSError):
        return False
    found = {re.sub(SINGLE_EXPERT, _joined, name) for name in own.values() if name.startswith("layer.")}
    layers: Any = target.model.get_decoder().layers
    return any(found == {f"layer.{name}" for name in layer.state_dict()} for layer in layers)


def _module(target: Source, folder: str) -> tuple[Layout, dict[str, str]]:
    """The layout of the module in a directory, and our names for its tensors. Raises BuildError where there is none, or
    more than one."""
    layers = target.model.config.get_text_config().num_hidden_layers
    names = tensor_names(folder)
    further = [name for name in sorted(names) if re.fullmatch(FURTHER, name) or _layer_of(name) > layers]
    if further:
        raise BuildError(f"drafter: mtp: expected one module, got another, {further[0]}; several are not supported")
    for layout in LAYOUTS.values():
        own = {name: ours for name in names if (ours := _own_name(name, layout, layers))}
        if {"proj.weight", "enorm.weight", "hnorm.weight"} <= set(own.values()):
            return layout, own
    raise BuildError(
        f"drafter: mtp: expected a module for multi-token prediction in the checkpoint of {target.name}, as "
        f"{', '.join(LAYOUTS)} have it, got none"
    )


def _folder(target: Source) -> Path:
    """The directory of the target's tensors. Raises BuildError."""
    path = local(target.name)
    if path.is_file():
        raise BuildError("drafter: mtp: expected a model in a directory, got a GGUF file, of which no module is read")
    return path


def _layer_of(name: str) -> int:
    found = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found and "mtp" not in name else -1


def _own_name(name: str, layout: Layout, layers: int) -> str | None:
    """The name that `MtpHead` has for a tensor of the checkpoint; None for one that is not the module's."""
    found = re.match(layout.prefix.replace("LAYER", str(layers)), name)
    if not found:
        return None
    rest = name[found.end() :]
    for pattern, ours in layout.names:
        if match := re.fullmatch(pattern, rest):
            return match.expand(ours)
    return f"layer.{rest}"


def _scorer(name: str, target: Source, config: EngineConfig, layout: Layout, tensors: dict[str, Tensor]) -> Recurrent:
    model: Any = target.model
    text, place = model.config.get_text_config(), _like_which(tensors, model.get_decoder().layers)
    last = model.get_decoder().layers[place]
    embed, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    for table, own in (("embed_tokens.weight", embed), ("lm_head.weight", lm_head)):
        if table in tensors and not torch.equal(tensors.pop(table).to(own.weight.dtype), own.weight.cpu()):
            raise BuildError(
                f"drafter: {name}: {table}: expected the target's own, got another one; it is not supported"
            )
    norms: dict[str, nn.Module] = {part: copy.deepcopy(last.input_layernorm) for part in ("enorm", "hnorm", "norm")}
    if "norm.weight" not in tensors:
        norms["norm"] = nn.Identity()
    head = MtpHead(
        text.hidden_size, norms, _copy_of(last), model.get_decoder().rotary_emb, lm_head,
        text.num_hidden_layers + 1, kept_by(model).caches[place], layout.hidden_first, "proj.bias" in tensors,
    )  # fmt: skip
    tensors = _with_joined_experts(tensors, head.state_dict())
    fill(name, head, tensors, without=["lm_head.", "rotary."])
    head.proj.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    return Recurrent(head, embed).eval().requires_grad_(False)


def _like_which(tensors: dict[str, Tensor], layers: Any) -> int:
    """The last of the target's layers that has the tensors of the module's, dense or a mixture of experts; the last of
    all where none has them."""
    for place in reversed(range(len(layers))):
        own = {f"layer.{name}" for name in layers[place].state_dict()}
        if own == {name for name in _with_joined_experts(tensors, own) if name.startswith("layer.")}:
            return place
    return len(layers) - 1


def _copy_of(last: nn.Module) -> nn.Module:
    """A layer like one of the target's, with the same config, over a cache of one layer."""
    configs = {id(module.config): module.config for module in last.modules() if hasattr(module, "config")}
    layer = copy.deepcopy(last, configs)
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0  # type: ignore[assignment]
    return layer


def _joined(single: re.Match[str]) -> str:
    """The name of the tensor that has those of all experts."""
    return f"{EXPERTS}{'down' if single[1] == 'down' else 'gate_up'}_proj"


def _with_joined_experts(tensors: dict[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors with those of single experts in one, where that is what is wanted and none is missing."""
    parts = [re.fullmatch(rf"{re.escape(EXPERTS)}(\d+)\.(gate|up|down)_proj\.weight", name) for name in tensors]
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

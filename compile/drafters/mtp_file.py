"""Modules for multi-token prediction that lie in the target's own checkpoint, as each publisher names them."""

import copy
import inspect
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BuildError
from ...graphs.attention import ATTENTION_NAME, register_attention
from ...graphs.drafters.mtp import LayersInTurn, MtpHead
from ...graphs.drafters.mtp_modules import MtpModules
from ...graphs.drafters.recurrent import CatchingUp, Recurrent
from ...graphs.kept import kept_by
from ..config import EngineConfig
from ..locate import local
from ..source import Source
from .mtp_experts import joined_name, with_joined_experts
from .mtp_layouts import LAYOUTS, NECESSARY, SPECULATORS, Layout, number_of, own_name
from .published import config_of, fill, read_some, read_tensors, tensor_names

NAME = "mtp"  # of the drafter
ATTENTION, RECURRENT = "full_attention", "linear_attention"  # types of layers


Modules = Sequence[dict[str, Tensor]]  # the tensors of each module by our names


def load_mtp(target: Source, config: EngineConfig) -> CatchingUp:
    """The modules in the target's checkpoint -> their scorer, in the engine's dtype and on its device. Raises
    BuildError where there are none, and for every tensor of them that does not fit."""
    folder = str(_folder(target))
    layout, own = _modules(target, folder)
    tensors = read_some(folder, {name for names in own for name in names})
    modules = [{ours: tensors[name] for name, ours in names.items()} for names in own]
    return _scorer(NAME, target, config, layout, modules)


def is_mtp_speculator(name: str) -> bool:
    """Whether a path is a module for a target that lies apart from it, as speculators writes it."""
    return (config_of(name) or {}).get("speculators_model_type") == "mtp"


def load_mtp_speculator(name: str, target: Source, config: EngineConfig) -> CatchingUp:
    """The same of such a path. Raises BuildError."""
    data = config_of(name) or {}
    modules = data.get("num_nextn_predict_layers", 1)
    if modules != 1:
        raise BuildError(f"drafter: {name}: config.json: num_nextn_predict_layers: expected 1, got {modules!r}")
    tensors = {own_name(key, SPECULATORS, 0) or key: value for key, value in read_tensors(name).items()}
    if missing := (NECESSARY | {"norm.weight"}) - set(tensors):
        raise BuildError(f"drafter: {name}: tensors do not fit: missing {', '.join(sorted(missing))}")
    return _scorer(name, target, config, SPECULATORS, [tensors])


def has_module(target: Source) -> bool:
    """Whether the target's checkpoint has modules whose layers have the tensors of one of the target's."""
    try:
        layout, own = _modules(target, str(_folder(target)))
        if layout.types:
            _types(NAME, target.model, layout)
    except (BuildError, OSError):
        return False
    layers: Any = target.model.get_decoder().layers
    known = [{f"layer.{name}" for name in layer.state_dict()} for layer in layers]
    return bool(layout.layer) or all(layer in known for names in own for layer in _inner_layers(names, layout))


def _inner_layers(names: dict[str, str], layout: Layout) -> list[set[str]]:
    """The tensors of a module's layers by our names, each as if there were no other."""
    inner = {joined_name(name) for name in names.values() if name.startswith("layer.")}
    if not layout.types:
        return [inner]
    starts = {".".join(name.split(".", 2)[:2]) for name in inner}  # layer.0, layer.1
    return [
        {name.replace(start, "layer", 1) for name in inner if name.startswith(f"{start}.")} for start in sorted(starts)
    ]


def _modules(target: Source, folder: str) -> tuple[Layout, list[dict[str, str]]]:
    """The layout of the modules in a directory, and our names for the tensors of each. Raises BuildError where there
    are none, or several of which it is not known what they take."""
    text = target.model.config.get_text_config()
    layers, names = text.num_hidden_layers, tensor_names(folder)
    for layout in LAYOUTS.values():
        if set(_named(names, layout, layers, 0).values()) >= NECESSARY:
            break
    else:
        raise BuildError(
            f"drafter: mtp: expected a module for multi-token prediction in the checkpoint of {target.name}, as "
            f"{', '.join(LAYOUTS)} have it, got none"
        )
    count = 1 if layout.types else 1 + max(number_of(name, layers) for name in names)
    if layout.chained is None and count > 1:
        further = next(name for name in sorted(names) if number_of(name, layers) > 0)
        raise BuildError(
            f"drafter: mtp: expected one module, got another, {further}; several are known of DeepSeek-V3's layout and "
            "MiMo-V2's"
        )
    said = getattr(text, "num_nextn_predict_layers", None)
    if (layout.chained is not None or layout.types) and said not in (None, max(count, 1)):
        raise BuildError(
            f"drafter: mtp: num_nextn_predict_layers: expected {count}, as many modules as the checkpoint has, got "
            f"{said!r}"
        )
    return layout, [_named(names, layout, layers, module) for module in range(max(count, 1))]


def _named(names: Collection[str], layout: Layout, layers: int, module: int) -> dict[str, str]:
    return {name: ours for name in names if (ours := own_name(name, layout, layers, module))}


def _folder(target: Source) -> Path:
    """The directory of the target's tensors. Raises BuildError."""
    path = local(target.name)
    if path.is_file():
        raise BuildError(
            "drafter: mtp: expected a model in a directory, got a GGUF file; MTP modules are read from directories only"
        )
    return path


def _scorer(name: str, target: Source, config: EngineConfig, layout: Layout, modules: Modules) -> CatchingUp:
    heads = [
        _head(name if len(modules) == 1 else f"{name}: module {place}", target, config, layout, tensors)
        for place, tensors in enumerate(modules)
    ]
    embed: Any = target.model.get_input_embeddings()
    unrolled = len(heads) == 1 and layout.chained is not False
    scorer = Recurrent(heads[0], embed) if unrolled else MtpModules(heads, embed, chained=bool(layout.chained))
    return scorer.eval().requires_grad_(False)


def _head(name: str, target: Source, config: EngineConfig, layout: Layout, tensors: dict[str, Tensor]) -> MtpHead:
    """One module, with its tensors. Raises BuildError."""
    model: Any = target.model
    text, decoder = model.config.get_text_config(), model.get_decoder()
    _check_tables(name, model, tensors)
    layer, place = _layer(name, model, layout, tensors)
    norm = layer[0].norm if layout.types else layer.input_layernorm
    norms: dict[str, nn.Module] = {part: copy.deepcopy(norm) for part in ("enorm", "hnorm", "norm")}
    if "norm.weight" not in tensors:
        norms["norm"] = nn.Identity()
    rotary = getattr(decoder, "rotary_emb", None)
    by_kind = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
    head = MtpHead(
        text.hidden_size, norms, layer, rotary, model.get_output_embeddings(),
        text.num_hidden_layers, layout.normed, kept_by(model).caches[place], layout.hidden_first,
        "proj.bias" in tensors, text.layer_types[place] if by_kind else None,
    )  # fmt: skip
    tensors = with_joined_experts(tensors, head.state_dict())
    fill(name, head, tensors, without=["lm_head.", "rotary."])
    head.proj.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    return head


def _check_tables(name: str, model: Any, tensors: dict[str, Tensor]) -> None:
    """Take embeddings and a head out of a module's tensors. Raises BuildError where they are not the target's own."""
    tables = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    for table, own in tables.items():
        weight = tensors.pop(f"{table}.weight", None)
        if weight is not None and not torch.equal(weight.to(own.weight.dtype), own.weight.cpu()):
            raise BuildError(
                f"drafter: {name}: {table}.weight: expected the target's own, got another one; it is not supported"
            )


def _layer(name: str, model: Any, layout: Layout, tensors: dict[str, Tensor]) -> tuple[Any, int]:
    """A layer for a module, not filled yet, and the number of one of the target's whose cache is like its. Raises
    BuildError."""
    layers, text = model.get_decoder().layers, model.config.get_text_config()
    if layout.types:
        return _layers_in_turn(name, model, layout)
    if not layout.layer:
        place = _like_which(tensors, layers)
        return _copy_of(layers[place]), place
    own = copy.deepcopy(text)
    for field, value in layout.layer.items():
        if not hasattr(text, field):
            raise BuildError(f"drafter: {name}: expected a target whose config has {field}, got {text.model_type}")
        setattr(own, field, value)
    kind = layout.layer["layer_types"][0]
    if kind not in text.layer_types:
        raise BuildError(f"drafter: {name}: expected a target with a layer of type {kind}, got {text.layer_types}")
    register_attention()
    own._attn_implementation = ATTENTION_NAME
    return type(layers[0])(own, 0).to(device=model.device, dtype=model.dtype), text.layer_types.index(kind)


def _layers_in_turn(name: str, model: Any, layout: Layout) -> tuple[LayersInTurn, int]:
    """The same of a module that has several. Raises BuildError."""
    types, layers = _types(name, model, layout), model.get_decoder().layers
    own = [layer.block_type for layer in layers]
    return LayersInTurn(_copy_of(layers[own.index(kind)]) for kind in types), own.index(ATTENTION)


def _types(name: str, model: Any, layout: Layout) -> list[str]:
    """The types of a module's layers, of which the target has each. Raises BuildError."""
    types = getattr(model.config.get_text_config(), layout.types, None) or []
    own = [getattr(layer, "block_type", None) for layer in model.get_decoder().layers]
    odd = [kind for kind in types if kind not in own]
    if odd:
        raise BuildError(f"drafter: {name}: {layout.types}: expected types of layers of the target, got {odd[0]!r}")
    if types.count(ATTENTION) != 1 or RECURRENT in types:
        raise BuildError(
            f"drafter: {name}: {layout.types}: expected one layer of type {ATTENTION} and others without a state, got "
            f"{types}"
        )
    return list(types)


def _like_which(tensors: dict[str, Tensor], layers: Any) -> int:
    """The last of the target's layers that has the tensors of the module's, dense or a mixture of experts; the last of
    all where none has them."""
    for place in reversed(range(len(layers))):
        own = {f"layer.{name}" for name in layers[place].state_dict()}
        if own == {name for name in with_joined_experts(tensors, own) if name.startswith("layer.")}:
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

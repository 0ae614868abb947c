"""What a tiny model of an architecture is, and how it becomes a GGUF file as llama.cpp's converter writes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
import transformers
from gguf.constants import MODEL_ARCH_NAMES
from gguf_files import Tensors, write_gguf
from models import GPT2, SMALL
from torch import Tensor
from transformers import AutoModelForCausalLM

ROPE = {"rope_theta": 20000.0}
OTHERS = {"sinks": "attn_sinks.weight", "e_score_correction_bias": "exp_probs_b.bias"}  # not in gguf's table


class Case(NamedTuple):
    """architecture: in the file. model: transformers' class. changes: of its tiny config. keys: of the metadata, beside
    those that all have. convert: the model, a name in the file and a tensor -> as the file has it. own: the model, a
    name in it and a tensor -> what the file has for it, where gguf's table does not say it."""

    architecture: str
    model: str
    changes: dict[str, Any] = {}  # noqa: RUF012
    keys: dict[str, Any] = {}  # noqa: RUF012
    convert: Callable[[Any, str, Tensor], Tensor] = lambda model, name, tensor: tensor
    own: Callable[[Any, str, Tensor], Tensors] = lambda model, name, tensor: {}


def interleaved(model: Any, name: str, tensor: Tensor) -> Tensor:
    """The converter's `permute`: halves of heads become pairs."""
    for part, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
        if part in name:
            count = getattr(model.config, heads)
            whole = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            return whole.transpose(1, 2).reshape(tensor.shape)
    return tensor


def case_model(case: Case, seed: int = 0) -> Any:
    """The model of a case; no bias or norm is what it would be if it were left out."""
    torch.manual_seed(seed)
    base = GPT2 if case.model == "GPT2" else SMALL
    config = getattr(transformers, f"{case.model}Config")(**(base | case.changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "sinks", ".D")) or "norm" in name or ".ln_" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            if name.endswith("A_log") and parameter.dim() == 2:  # of Mamba, the same for all channels at the start
                parameter += torch.randn_like(parameter)
    return model


def save_case(path: Path, case: Case, model: Any, **options: Any) -> Path:
    """Write the model of a case."""
    tensors = {name: case.convert(model, name, tensor) for name, tensor in named_tensors(case, model).items()}
    return write_gguf(path, case.architecture, metadata(case, model), tensors, **options)


def metadata(case: Case, model: Any) -> dict[str, Any]:
    """Keys that every architecture has, then the case's own; without the architecture's name ahead."""
    config = model.config
    theta = next((p["rope_theta"] for p in (config.to_dict().get("rope_parameters") or {},) if "rope_theta" in p), None)
    theta = theta or (ROPE["rope_theta"] if case.model in ("Gemma3Text", "Olmo3") else None)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.to_dict().get("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": next(
            (getattr(config, name) for name in ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
             if hasattr(config, name)), None),
        "rope.freq_base": theta,
    }  # fmt: skip
    return {key: value for key, value in (found | case.keys).items() if value is not None}


def named_tensors(case: Case, model: Any) -> Tensors:
    """The model's tensors by the names of gguf's table; experts' are cut as files have them."""
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == case.architecture)
    names, found = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers), {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        part = name.rpartition(".")[2]
        if own := case.own(model, name, tensor):
            found |= own
        elif part.startswith(("gate_up_proj", "down_proj")) and "experts" in name and part != "weight":
            found |= _experts(case, f"blk.{layer}", part, tensor)
        elif "kv_b_proj" in name and "attention.key_length_mla" in case.keys:
            both = tensor.unflatten(0, (model.config.num_attention_heads, -1)).split_with_sizes(
                [model.config.qk_nope_head_dim, model.config.v_head_dim], 1
            )
            found[f"blk.{layer}.attn_k_b.weight"], found[f"blk.{layer}.attn_v_b.weight"] = both[0].mT, both[1]
        elif part in OTHERS:
            found[f"blk.{layer}.{OTHERS[part]}"] = tensor
        else:
            suffixes = (".weight", ".bias")
            stored = names.get_name(name, suffixes) or names.get_name(f"backbone{name.removeprefix('model')}", suffixes)
            assert stored is not None, name
            found[stored] = tensor
    rope = model.config.to_dict().get("rope_parameters") or {}
    factors = {part: rope[f"{part}_factor"] for part in ("short", "long") if f"{part}_factor" in rope}
    return found | {f"rope_factors_{part}.weight": torch.tensor(values) for part, values in factors.items()}


def _experts(case: Case, block: str, part: str, tensor: Tensor) -> Tensors:
    suffix = "bias" if part.endswith("bias") else "weight"
    if case.architecture == "gpt-oss":
        tensor = tensor if suffix == "bias" else tensor.transpose(1, 2)
        halves = tensor[:, ::2], tensor[:, 1::2]
    else:
        tensor = tensor.transpose(1, 2) if case.architecture == "llama4" else tensor
        halves = tensor.chunk(2, 1)
    if part.startswith("down_proj"):
        return {f"{block}.ffn_down_exps.{suffix}": tensor}
    return {f"{block}.ffn_{name}_exps.{suffix}": half for name, half in zip(("gate", "up"), halves, strict=True)}

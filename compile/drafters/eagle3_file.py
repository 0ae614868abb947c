"""EAGLE-3 heads as they are published: config.json and one weights file, under either of the names in use."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...errors import BuildError
from ...graphs.drafters.eagle3 import Eagle3Config, Eagle3Head
from ...graphs.drafters.recurrent import Recurrent, RecurrentHead
from ...user_cache import keep
from ..config import EngineConfig
from ..source import Source
from .eagle3_config import AUX_LAYERS, FLAGS, LAYER_FIELDS, read_config, window_fields
from .ngram_file import SHIPPED, tokenizer_hash
from .published import FILES, config_of, fill, folder_of, read_tensors

Head = TypeVar("Head", bound=Eagle3Head)
Placed = TypeVar("Placed", bound=RecurrentHead)


def is_eagle3(name: str) -> bool:
    """Whether a path is an EAGLE-3 head: its config.json has a draft vocabulary or an Eagle3 architecture."""
    data = config_of(name) or {}
    return "draft_vocab_size" in data or "Eagle3" in "".join(data.get("architectures") or ())


def load_eagle3(name: str, target: Source, config: EngineConfig) -> Recurrent:
    """A head from a directory, or from a weights file with config.json beside it -> its scorer, in the engine's
    dtype and on its device. Raises BuildError naming every field or tensor that does not fit."""
    head, own = read_head(name, target)
    return Recurrent(*placed(head, own, target, config)).eval().requires_grad_(False)


def placed(head: Placed, own: Tensor | None, target: Source, config: EngineConfig) -> tuple[Placed, Any]:
    """A head with an `fc` and the embeddings that it reads, its own or the target's, in the engine's dtype and on its
    device."""
    embed: Any = target.model.get_input_embeddings() if own is None else nn.Embedding.from_pretrained(own)
    moved: Any = head.to(device=config.build_device, dtype=getattr(torch, config.dtype))
    moved.rotary = LlamaRotaryEmbedding(moved.config.layer).to(config.build_device)  # its frequencies stay float32
    return moved, embed.to(moved.fc.weight)


def read_head(name: str, target: Source) -> tuple[Eagle3Head, Tensor | None]:
    """A head for the target, in float32 on the CPU, and its own embeddings where it has some. Raises BuildError."""
    return read_head_as(Eagle3Head, read_config, name, target)


def read_head_as(
    kind: Callable[[Any], Head], read: Callable[..., Eagle3Config], name: str, target: Source
) -> tuple[Head, Tensor | None]:
    """The same of a head of some kind, whose config is read by `read`, as `read_config` does. Raises BuildError."""
    check_target(name, target)
    text, vocabulary = target.model.config.get_text_config(), target.model.get_input_embeddings().num_embeddings
    config = read(folder_of(name) / "config.json", text.hidden_size, text.num_hidden_layers, vocabulary)
    tensors = {_plain_name(key): value for key, value in read_tensors(name).items()}
    own = tensors.pop("embed_tokens.weight", None)
    config = dataclasses.replace(config, input_norms=any(key.endswith(".q_norm.weight") for key in tensors))
    width = (target.model.get_input_embeddings().weight if own is None else own).shape[1]
    size = config.layer.hidden_size
    if width != size:
        raise BuildError(f"drafter: {name}: hidden_size: expected {width}, that of the embeddings, got {size}")
    try:
        head = kind(config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # transformers' own, of odd values
        raise BuildError(f"drafter: {name}: config.json: expected that of a Llama layer, got {error!r}") from None
    _fill(name, head, tensors, vocabulary)
    return head, own


def describe_target(target: Source) -> dict[str, Any]:
    """The fields by which a head of ours names the target it was trained for."""
    text = target.model.config.get_text_config()
    return {
        "tokenizer": tokenizer_hash(target.tokenizer) if target.tokenizer else None,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
    }


def check_target(name: str, target: Source) -> None:
    """Refuse a head of ours that was trained for another tokenizer or another size. Heads of others carry no such
    fields. Raises BuildError."""
    said = json.loads((folder_of(name) / "config.json").read_text()).get("specstep") or {}
    for field, expected in describe_target(target).items():
        got = said.get(field)
        if None not in (expected, got) and got != expected:
            raise BuildError(
                f"drafter: {name}: {field}: expected the target's {expected}, got {got}; train a head for {target.name}"
            )


def shipped_head(target: Source) -> Path | None:
    """The head in this package that was trained for a target like this one, if there is any."""
    for path in sorted(SHIPPED.glob("*/config.json")):
        if json.loads(path.read_text()).get("specstep") == describe_target(target):
            return path.parent
    return None


def _plain_name(name: str) -> str:
    return (
        name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
        if "fc_norm" not in name
        else name.removeprefix("model.")
    )


def _fill(name: str, head: Eagle3Head, tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Put the tensors into the head, all of them and no others."""
    tensors.pop("t2d", None)  # marks d2t's image once more
    if "d2t" not in tensors and head.config.draft_vocab_size == vocabulary:  # one over all tokens needs no map
        tensors["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)
    fill(name, head, tensors)
    ids = tensors["d2t"] + torch.arange(head.config.draft_vocab_size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise BuildError(
            f"drafter: {name}: d2t: expected target ids below {vocabulary}, got {int(ids.min())} to {int(ids.max())}"
        )


def save_eagle3(folder: Path, head: Eagle3Head, target: Source) -> None:
    """Write a head as the field publishes them. Raises BuildError when it cannot be written."""
    write_head(folder, head, target, {})


def write_head(folder: Path, head: Eagle3Head, target: Source, own: dict[str, Any]) -> None:
    """Write a head whose config has fields of its own besides. Raises BuildError when it cannot be written."""
    vocabulary = target.model.get_output_embeddings().weight.shape[0]
    config = layer_fields(head.config.layer) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": head.config.layer.rope_parameters["rope_theta"],
        "vocab_size": vocabulary,
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        AUX_LAYERS: list(head.config.feature_layers),
        **{flag: getattr(head.config, flag) for flag in FLAGS},
        "norm_output": head.config.norm_feedback,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "specstep": describe_target(target),
        **window_fields(head.config.windows),
        **own,
    }
    ids = head.target_ids().cpu()
    marks = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    write_drafter(folder, config, head.state_dict() | {"t2d": marks})


def layer_fields(layer: LlamaConfig) -> dict[str, Any]:
    """The fields of a layer's config that `layer_config` reads."""
    return {field: value for field in LAYER_FIELDS if (value := getattr(layer, field, None)) is not None}


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and a weights file, real numbers in bfloat16. Raises BuildError when they cannot be written."""
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).cpu().contiguous()
        for name, tensor in tensors.items()
    }
    try:
        keep(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        keep(folder / FILES[0], save(tensors))
    except OSError as error:
        raise BuildError(f"{folder}: expected room for the drafter, got {error}") from None

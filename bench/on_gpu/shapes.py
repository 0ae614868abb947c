"""Models and EAGLE-3 heads with random weights, at the sizes of published ones: speed needs no others."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from specstep.compile.drafters.eagle3_config import read_config
from specstep.graphs.drafters.eagle3 import Eagle3Head
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": None}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3-8b": COMMON | {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": COMMON | {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "tiny": COMMON | {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
HEAD_VOCABULARY = 32000
SURE = 6.0  # deviation of a head's logits: with less, all tokens are alike, and the likeliest nodes are all shallow
TREES: dict[str, dict[str, Any]] = {
    "chain 4": {"tree": "chain", "nodes": 4},
    "dynamic 16": {"tree": "dynamic", "nodes": 16, "depth": 5, "top_k": 4},
    "dynamic 32": {"tree": "dynamic", "nodes": 32, "depth": 5, "top_k": 8},
    "dynamic 64": {"tree": "dynamic", "nodes": 64, "depth": 5, "top_k": 10},
}


@dataclass(frozen=True)
class RandomModel:
    """A model of MODELS on disk."""

    name: str
    folder: Path
    dtype: torch.dtype

    def load(self, device: str) -> PreTrainedModel:
        """The model as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).to(device).eval()

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of the weights that a pass reads, and of a token's keys and values."""
        model = new_model(self.name, "meta", self.dtype)
        return {"weight_bytes": weight_bytes(model), "cache_bytes": cache_bytes(model.config, self.dtype)}


def new_model(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of MODELS with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(**MODELS[name]), dtype=dtype)


def save_random_model(folder: Path, name: str, device: str, dtype: torch.dtype) -> RandomModel:
    """Write a model of MODELS, if it is not there. Its weights are drawn on the device: eight billion take minutes on a
    CPU."""
    if not (folder / "config.json").is_file():
        new_model(name, device, dtype).save_pretrained(folder)
    return RandomModel(name, folder, dtype)


def save_random_head(folder: Path, name: str) -> Path:
    """Write an EAGLE-3 head for a model of MODELS, if it is not there: one layer of the model's sizes, a smaller
    vocabulary."""
    if (folder / "model.safetensors").is_file():
        return folder
    model = MODELS[name]
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    config = {size: model[size] for size in sizes}
    config["draft_vocab_size"] = min(HEAD_VOCABULARY, model["vocab_size"] // 2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    head = Eagle3Head(
        read_config(folder / "config.json", model["hidden_size"], model["num_hidden_layers"], model["vocab_size"])
    )
    torch.nn.init.normal_(head.lm_head.weight, std=SURE / model["hidden_size"] ** 0.5)
    save_file({key: tensor.clone() for key, tensor in head.state_dict().items()}, folder / "model.safetensors")
    return folder


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads whole: all but the embeddings, of which it reads a row for each token,
    unless the head shares them."""
    embedded = model.get_input_embeddings().weight
    apart = embedded is not model.get_output_embeddings().weight
    return sum(parameter.nbytes for parameter in model.parameters() if not (apart and parameter is embedded))


def cache_bytes(config: LlamaConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token."""
    size = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * size * dtype.itemsize

"""Tiny random assistants of Gemma 4, and a target for them."""

import pytest
import torch
import transformers
from models import ARCHITECTURES, SMALL, save_model

WINDOW = 6
TARGET = SMALL | {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": WINDOW, "head_dim": 16,
    "global_head_dim": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "num_global_key_value_heads": 1,
}  # fmt: skip
ASSISTANT = TARGET | {
    "hidden_size": 40, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 20, "centroid_intermediate_top_k": 3}


def save_target(folder):
    """Write a random target, which assistants read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "Gemma4Text", TARGET)
        return save_model(folder, "Gemma4Text")


def save_assistant(folder, seed=0, backbone=48, **changes):
    """Write a random assistant."""
    own = {name: changes.pop(name) for name in [*changes] if name in ASSISTANT}
    text = transformers.Gemma4TextConfig(**ASSISTANT | own).to_dict()
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone, **changes)
    torch.manual_seed(seed)
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(config.get_text_config().vocab_size))
    model.save_pretrained(folder)
    return folder

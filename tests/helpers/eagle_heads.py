"""Tiny random heads of EAGLE and HASS, in each layout that they are published in, and their plain recomputation."""

import json

import torch
from models import VOCABULARY
from plain_eagle3 import last_hidden, plain_layer
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "vocab_size": VOCABULARY,
}  # fmt: skip


def eagle_tensors(embeddings, seed=0, bias=True, qkv_bias=False):
    """A random head under the names of its authors; embeddings [V, 48]: the target's."""
    torch.manual_seed(seed)
    shapes = {"fc.weight": (48, 96), "layers.0.post_attention_layernorm.weight": (48,)} | {
        f"layers.0.{name}.weight": shape
        for name, shape in {
            "self_attn.q_proj": (48, 48), "self_attn.k_proj": (24, 48), "self_attn.v_proj": (24, 48),
            "self_attn.o_proj": (48, 48), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
        }.items()
    }  # fmt: skip
    shapes |= {"fc.bias": (48,)} if bias else {}
    shapes |= {f"layers.0.self_attn.{part}_proj.bias": (48 if part == "q" else 24,) for part in "qkv" if qkv_bias}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    return tensors | {"embed_tokens.weight": embeddings.detach().clone()}


def save_authors(folder, tensors, **config):
    """As the authors write it: pytorch_model.bin."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def save_prefixed(folder, tensors, **config):
    """As others convert it: safetensors, names behind `model.`, frequencies of the rotary embeddings among them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    named["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(named, folder / "model.safetensors")
    return folder


def save_speculators(folder, tensors, **config):
    """As speculators wrote the type `eagle`."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "layernorms": False,
        "transformer_layer_architecture": "LlamaDecoderLayer", "fusion_bias": "fc.bias" in tensors,
        "transformer_layer_config": CONFIG,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole | config))
    renamed = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    named = {}
    for name, tensor in tensors.items():
        for own, theirs in renamed.items():
            name = name.replace(own, theirs)
        named[name] = tensor
    save_file(named, folder / "model.safetensors")
    return folder


LAYOUTS = {"authors": save_authors, "prefixed": save_prefixed, "speculators": save_speculators}


def eagle_chain(w, model, tokens, length, shift=1):
    """The chain that EAGLE drafts after these tokens, recomputed from nothing at every level. shift: how many places
    behind a hidden state the token is that it is paired with; 1 in the right chain."""
    hidden = last_hidden(model, tokens)
    following = [*tokens, tokens[-1]][shift : shift + len(hidden)]
    drafted = []
    for _ in range(length):
        both = torch.cat([w["embed_tokens.weight"][torch.tensor(following)], hidden], -1)
        x = both @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        out = plain_layer(w, "layers.0.", x, x)
        drafted.append(int((out[-1] @ model.get_output_embeddings().weight.T).argmax()))
        following.append(drafted[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafted

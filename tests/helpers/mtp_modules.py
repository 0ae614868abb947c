"""Tiny random modules for multi-token prediction in a target's checkpoint, as each publisher names them, and the chains
that they draft, recomputed."""

import json

import torch
from models import SMALL
from plain_eagle3 import last_hidden, plain_layer, rms
from safetensors.torch import load_file, save_file

LAYERS = 3  # of the targets
NORMS = ("enorm", "hnorm", "norm")
GLM = SMALL | {
    "head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def module_tensors(model, layer=-1, seed=0):
    """A random module with a layer like one of the model's: `enorm`, `hnorm`, `proj`, `norm`, and `layer.` with a
    matrix for each expert."""
    torch.manual_seed(seed)
    tensors = {"proj.weight": torch.randn(48, 96) * 0.3} | {f"{norm}.weight": norm_weight(48) for norm in NORMS}
    for name, tensor in model.get_decoder().layers[layer].state_dict().items():
        new = norm_weight(len(tensor)) if "norm" in name else torch.randn(tensor.shape) * 0.3
        if name == "mlp.experts.gate_up_proj":
            for expert, (gate, up) in enumerate(zip(*new.chunk(2, 1), strict=True)):
                tensors[f"layer.mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"layer.mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif name == "mlp.experts.down_proj":
            tensors |= {f"layer.mlp.experts.{expert}.down_proj.weight": down.clone() for expert, down in enumerate(new)}
        else:
            tensors[f"layer.{name}"] = new
    return tensors


def norm_weight(size):
    return 1 + 0.1 * torch.randn(size)


LAYOUTS = {  # our names for the parts -> the publisher's
    "DeepSeek-V3": {"proj": "model.layers.3.eh_proj", "enorm": "model.layers.3.enorm", "hnorm": "model.layers.3.hnorm",
                    "norm": "model.layers.3.shared_head.norm", "layer": "model.layers.3"},
    "MiMo": {"proj": "model.mtp_layers.0.input_proj", "enorm": "model.mtp_layers.0.token_layernorm",
             "hnorm": "model.mtp_layers.0.hidden_layernorm", "norm": "model.mtp_layers.0.final_layernorm",
             "layer": "model.mtp_layers.0"},
    "Ernie": {"proj": "model.mtp_linear_proj.0", "enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0",
              "layer": "model.mtp_block.0"},
    "Qwen3-Next": {"proj": "mtp.fc", "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
                   "norm": "mtp.norm", "layer": "mtp.layers.0"},
}  # fmt: skip


def add_module(folder, layout, tensors, **more):
    """Write a module into the checkpoint of a target, and tensors under their published names beside it."""
    names, file = LAYOUTS[layout], folder / "model.safetensors"
    named = {
        name.replace(part, names[part], 1): tensor
        for name, tensor in tensors.items()
        for part in [name.split(".")[0]]
        if part in names
    }
    save_file(load_file(file) | named | more, file, {"format": "pt"})
    return folder


def save_speculator(folder, tensors, **config):
    """Write a module in a directory of its own, as speculators does."""
    names = LAYOUTS["MiMo"]
    named = {
        name.replace(part, names[part], 1).removeprefix("model."): tensor
        for name, tensor in tensors.items()
        for part in [name.split(".")[0]]
    }
    folder.mkdir()
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"} | config))
    return folder


def mtp_chain(w, model, tokens, length, layout="MiMo", shift=1):
    """The chain that a module with a Llama layer drafts after these tokens, recomputed from nothing at every level.
    shift: how many places behind a hidden state the token is that it is paired with; 1 in the right chain."""
    hidden = last_hidden(model, tokens)
    following = [*tokens, tokens[-1]][shift : shift + len(hidden)]
    drafted = []
    for _ in range(length):
        embedded = model.get_input_embeddings()(torch.tensor(following))
        both = [rms(embedded, w["enorm.weight"]), rms(hidden, w["hnorm.weight"])]
        x = torch.cat(both[::-1] if layout == "MiMo" else both, -1) @ w["proj.weight"].T
        out = plain_layer(w, "layer.", rms(x, w["layer.input_layernorm.weight"]), x)[-1:]
        out = out if layout == "Ernie" else rms(out, w["norm.weight"])
        drafted.append(int((out[-1] @ model.get_output_embeddings().weight.T).argmax()))
        following.append(drafted[-1])
        hidden = torch.cat([hidden, out])
    return drafted

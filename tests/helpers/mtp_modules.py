"""Tiny random modules for multi-token prediction in a target's checkpoint, as each publisher names them, and the chains
that they draft, recomputed."""

import copy
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
    return write_module(folder, LAYOUTS[layout], tensors, **more)


def write_module(folder, names, tensors, **more):
    """The same with the publisher's names, see LAYOUTS."""
    file = folder / "model.safetensors"
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


def nemotron_h_module(model, seed=0):
    """A random module of Nemotron-H's for a model: its layers with the norm behind them, as transformers' own, and all
    its tensors under their published names."""
    config = copy.deepcopy(model.config)
    config.layers_block_type = list(config.mtp_layers_block_type)
    layers = type(model.model)(config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in layers.state_dict().items():
            tensor.copy_(torch.randn(tensor.shape) * 0.3 + ("norm" in name))
    tensors = {f"0.{norm}.weight": norm_weight(48) for norm in ("enorm", "hnorm")}
    tensors["0.eh_proj.weight"] = torch.randn(48, 96) * 0.3
    for name, tensor in layers.state_dict().items():
        if name.startswith("layers.1.mixer.experts."):
            part = name.rpartition(".")[2]
            tensors |= {f"1.mixer.experts.{n}.{part}.weight": one.clone() for n, one in enumerate(tensor)}
        elif name.startswith("layers."):
            tensors[name.removeprefix("layers.")] = tensor.clone()
    tensors["1.final_layernorm.weight"] = layers.norm_f.weight.detach().clone()
    return layers, {f"mtp.layers.{name}": tensor for name, tensor in tensors.items()}


def nemotron_h_chain(layers, w, model, tokens, length, shift=1):
    """The chain that it drafts after these tokens, recomputed from nothing at every level. shift: as in `mtp_chain`."""
    hidden, drafted = last_hidden(model, tokens), []
    following = [*tokens, tokens[-1]][shift : shift + len(hidden)]
    first = "mtp.layers.0"
    for _ in range(length):
        embedded = model.get_input_embeddings()(torch.tensor(following))
        both = [rms(embedded, w[f"{first}.enorm.weight"]), rms(hidden, w[f"{first}.hnorm.weight"])]
        x = torch.cat(both, -1) @ w[f"{first}.eh_proj.weight"].T
        out = layers(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]
        drafted.append(int((out[-1] @ model.get_output_embeddings().weight.T).argmax()))
        following.append(drafted[-1])
        hidden = torch.cat([hidden, out])
    return drafted


MIMO_V2 = SMALL | {
    "head_dim": 12, "v_head_dim": 10, "sliding_window": 5, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip


def add_deepseek_modules(folder, modules):
    """Write several modules into the checkpoint of a target, one behind the other as DeepSeek's layout has them."""
    for place, tensors in enumerate(modules):
        names = {
            part: name.replace("layers.3", f"layers.{LAYERS + place}") for part, name in LAYOUTS["DeepSeek-V3"].items()
        }
        write_module(folder, names, tensors)
    return folder


def mimo_v2_module(seed=0):
    """A random module of MiMo-V2's, under its published names without their beginning."""
    torch.manual_seed(seed)
    shapes = {
        "eh_proj": (48, 96), "self_attn.q_proj": (48, 48), "self_attn.k_proj": (48, 48), "self_attn.v_proj": (40, 48),
        "self_attn.o_proj": (48, 40), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
    }  # fmt: skip
    norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    tensors = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": norm_weight(48) for name in norms}
    return tensors | {"self_attn.attention_sink_bias": torch.randn(4)}


def add_mimo_v2_modules(folder, modules):
    """Write several of them into the checkpoint of a target."""
    file = folder / "model.safetensors"
    named = {
        f"model.mtp.layers.{place}.{name}": tensor
        for place, tensors in enumerate(modules)
        for name, tensor in tensors.items()
    }
    save_file(load_file(file) | named, file, {"format": "pt"})
    return folder


def mimo_v2_chain(modules, model, tokens, hidden, chained=False, shift=1):
    """The chain that such modules draft after these tokens, recomputed from nothing for each: hidden [T, 48] of all
    tokens but the last. shift: how many places behind a hidden state module 0's token is; 1 in the right chain."""
    drafted = []
    for place, w in enumerate(modules):
        following = [*tokens, *drafted, *tokens[-1:]][place + shift :][: len(hidden)]
        embedded = model.get_input_embeddings()(torch.tensor(following))
        x = torch.cat([rms(embedded, w["enorm.weight"]), rms(hidden, w["hnorm.weight"])], -1) @ w["eh_proj.weight"].T
        out = rms(mimo_v2_layer(w, x), w["final_layernorm.weight"])
        drafted.append(int((out[-1] @ model.get_output_embeddings().weight.T).argmax()))
        hidden = out if chained else hidden
    return drafted


def mimo_v2_layer(w, x, window=MIMO_V2["sliding_window"]):
    """A dense layer with sinks and a sliding window over x [T, 48]: 4 heads of 12, of which 4 dimensions turn."""
    normed, count = rms(x, w["input_layernorm.weight"]), len(x)
    q, k, v = ((normed @ w[f"self_attn.{part}_proj.weight"].T).view(count, 4, -1) for part in "qkv")
    angle = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, 4, 2) / 4)
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angle.cos(), angle.sin()))
    q, k = (
        torch.cat([y[..., :4] * cos + torch.cat([-y[..., 2:4], y[..., :2]], -1) * sin, y[..., 4:]], -1) for y in (q, k)
    )
    far = torch.arange(count)[:, None] - torch.arange(count)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 12**0.5
    scores = scores.masked_fill((far < 0) | (far >= window), -torch.inf)
    sinks = w["self_attn.attention_sink_bias"][:, None, None].expand(-1, count, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    x = x + torch.einsum("hqk,khd->qhd", weights, v * 0.707).flatten(1) @ w["self_attn.o_proj.weight"].T
    normed = rms(x, w["pre_mlp_layernorm.weight"])
    gate = torch.nn.functional.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
    return x + gate @ w["mlp.down_proj.weight"].T

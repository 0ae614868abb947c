"""Tiny random heads of Hydra and Hydra++ as they are published, and the chains that they draft, recomputed."""

import json

import torch
from models import VOCABULARY
from plain_eagle3 import last_hidden, plain_layer, rms

PREFIX = "prefix_embeding_layer."
LAYER = {
    "self_attn.q_proj": (48, 48), "self_attn.k_proj": (24, 48), "self_attn.v_proj": (24, 48),
    "self_attn.o_proj": (48, 48), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
}  # fmt: skip


def hydra_tensors(plus, count=3, layers=2, seed=0, vocabulary=VOCABULARY):
    """Random heads under their authors' names; Hydra++ has dropouts, which take numbers, and a layer of its own."""
    torch.manual_seed(seed)
    shapes = {}
    for head in range(count):
        for layer in range(layers):
            name = f"hydra_mlp.{head}.{2 * layer + 1 if plus else layer}."
            width = 48 if layer else (head + 2) * 48
            for part in ("linear", *(["res_connection"] if width != 48 else [])):
                shapes |= {f"{name}{part}.weight": (48, width), f"{name}{part}.bias": (48,)}
        name = f"hydra_lm_head.{head}.{'1.' if plus else ''}"
        shapes |= {f"{name}weight": (vocabulary, 48), f"{name}bias": (vocabulary,)}
    if plus:
        shapes |= {f"{PREFIX}layers.0.{name}.weight": shape for name, shape in LAYER.items()}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm") if plus else ()
    tensors |= {f"{PREFIX}{norm}.weight": 1 + 0.1 * torch.randn(48) for norm in norms}
    return tensors | ({f"{PREFIX}embed_tokens.weight": torch.zeros(vocabulary, 48)} if plus else {})


def save_hydra(folder, tensors, **config):
    """As the authors write it."""
    folder.mkdir(parents=True, exist_ok=True)
    arch = "prefix-mlp" if any(name.startswith(PREFIX) for name in tensors) else "mlp"
    whole = {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": arch, "grounded_heads": True}
    (folder / "config.json").write_text(json.dumps(whole | config))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return folder


def hydra_chain(w, model, tokens, length, off=0):
    """The chain that Hydra drafts after these tokens. off: how many places ahead of the right one the hidden state is
    that it starts from."""
    hidden, plus = last_hidden(model, tokens), f"{PREFIX}norm.weight" in w
    if plus:
        normed = rms(hidden, w[f"{PREFIX}layers.0.input_layernorm.weight"])
        hidden = rms(plain_layer(w, f"{PREFIX}layers.0.", normed, hidden), w[f"{PREFIX}norm.weight"])
    memory, drafted = hidden[-1 - off], [tokens[-1]]
    for head in range(length):
        x = memory = torch.cat([memory, model.get_input_embeddings().weight[drafted[-1]]])
        layer = int(plus)
        while f"hydra_mlp.{head}.{layer}.linear.weight" in w:
            name = f"hydra_mlp.{head}.{layer}."
            y = w[f"{name}linear.weight"] @ x + w[f"{name}linear.bias"]
            if f"{name}res_connection.weight" in w:
                x = w[f"{name}res_connection.weight"] @ x + w[f"{name}res_connection.bias"]
            x, layer = x + torch.nn.functional.silu(y), layer + 1 + plus
        name = f"hydra_lm_head.{head}.{'1.' if plus else ''}"
        drafted.append(int((w[f"{name}weight"] @ x + w[f"{name}bias"]).argmax()))
    return drafted[1:]

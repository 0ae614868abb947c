"""Tiny random heads of Medusa and mlp_speculator, and the chains that they draft, recomputed."""

import json
import re

import torch
from models import VOCABULARY
from plain_eagle3 import last_hidden
from safetensors.torch import save_file


def medusa_tensors(count=3, layers=2, seed=0, bias=True):
    """Random heads under the names of their authors."""
    torch.manual_seed(seed)
    tensors = {}
    for head in range(count):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(48, 48) * 0.2
            if bias:
                tensors[f"{head}.{layer}.linear.bias"] = torch.randn(48) * 0.2
        tensors[f"{head}.{layers}.weight"] = torch.randn(VOCABULARY, 48) * 0.2
    return tensors


def save_medusa(folder, tensors, **config):
    """As the authors write it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1} | config))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder


def save_vllm(folder, tensors, **config):
    """Under vLLM's names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa", "num_heads": 3} | config))
    named = {}
    for name, tensor in tensors.items():
        for authors, own in ((r"(\d)\.(\d)\.linear\.", r"blocks.\1.layers.\2."), (r"(\d)\.\d\.w", r"lm_heads.\1.w")):
            name = re.sub(authors, own, name)
        named[name] = tensor
    save_file(named, folder / "model.safetensors")
    return folder


def medusa_chain(w, model, tokens, length, ids=None, off=0):
    """The chain that Medusa drafts after these tokens. off: how many places ahead of the right one the hidden state is
    that it starts from."""
    hidden, drafted = last_hidden(model, tokens)[-1 - off], []
    for head in range(length):
        x, layer = hidden, 0
        while f"{head}.{layer}.linear.weight" in w:
            name = f"{head}.{layer}.linear."
            x = x + torch.nn.functional.silu(w[name + "weight"] @ x + w.get(name + "bias", 0.0))
            layer += 1
        best = int((w[f"{head}.{layer}.weight"] @ x).argmax())
        drafted.append(best if ids is None else int(ids[best]))
    return drafted


def mlp_tensors(levels=3, inner=32, seed=0, tied=False):
    """A random mlp_speculator under the names of its publisher."""
    torch.manual_seed(seed)
    tensors = {}
    for level in range(levels):
        if level == 0 or not tied:
            tensors[f"speculator.emb.{level}.weight"] = torch.randn(VOCABULARY, inner)
            tensors[f"speculator.ln.{level}.weight"] = 1 + 0.1 * torch.randn(inner)
            tensors[f"speculator.ln.{level}.bias"] = 0.1 * torch.randn(inner)
            tensors[f"speculator.head.{level}.weight"] = torch.randn(VOCABULARY, inner) * 0.2
        if level < 2 or not tied:
            tensors[f"speculator.proj.{level}.weight"] = torch.randn(inner, inner if level else 48) * 0.2
    return tensors


def save_mlp(folder, tensors, **config):
    """As IBM writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": 48,
        "inner_dim": 32, "n_predict": 3, "vocab_size": VOCABULARY, "tie_weights": False, "scale_input": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole | config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def mlp_chain(w, model, tokens, length, scale=False, off=0):
    """The chain that an mlp_speculator of three levels drafts after these tokens. off: how many places ahead of the
    right one the hidden state is that it starts from."""
    state, drafted = last_hidden(model, tokens)[-1 - off], [tokens[-1]]
    if scale:
        state = state * torch.rsqrt(state.pow(2).mean() + 1e-6) / 2**0.5

    def own(kind, level, field="weight"):
        while f"speculator.{kind}.{level}.{field}" not in w:
            level -= 1
        return w[f"speculator.{kind}.{level}.{field}"]

    inner, left = len(own("proj", 0)), 0.5 ** (0.5 / 3)
    for level in range(length):
        token = own("emb", level)[drafted[-1]]
        x = own("proj", level) @ state + ((1 - left**2) * inner / 2) ** 0.5 / left * token
        x = x * torch.rsqrt(x.pow(2).mean() + 1e-6) * own("ln", level) + own("ln", level, "bias")
        state = torch.nn.functional.gelu(x)
        drafted.append(int((own("head", level) @ state).argmax()))
    return drafted[1:]

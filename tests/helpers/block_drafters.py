"""Tiny random block drafters for a tiny Llama in each published layout, and what they say, by the papers."""

import json

import torch
from dflash2 import convolved, plain_selector, selector_tensors
from models import VOCABULARY
from plain_eagle3 import hidden_states, rms
from safetensors.torch import save_file

SIZE, HEADS, KV_HEADS, HEAD, MASK, RANK, BLOCK = 48, 4, 2, 16, 311, 8, 5
LAYER = {
    "model_type": "qwen3", "hidden_size": SIZE, "intermediate_size": 64, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "vocab_size": VOCABULARY,
}  # fmt: skip
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
# What is published -> its config, and what that means: which hidden states are read, the shift, what each layer masks.
ZLAB = LAYER | {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}}
JETSPEC = ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"causal_head": True}}
DEEPSPEC = LAYER | {
    "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [-1, 2], "mask_token_id": MASK, "block_size": BLOCK - 1,
    "markov_rank": RANK, "markov_head_type": "vanilla",
}  # fmt: skip
SAID = DEEPSPEC | {"block_size": BLOCK, "sample_from_anchor": False}
DFLASH = {
    "speculators_model_type": "dflash", "block_size": BLOCK, "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": MASK, "draft_vocab_size": 100, "sample_from_anchor": False, "sliding_window_non_causal": True,
    "transformer_layer_config": LAYER | SLIDING,
}  # fmt: skip
DSPARK = DFLASH | {
    "speculators_model_type": "dspark", "sample_from_anchor": True, "block_size": BLOCK - 1, "markov_rank": RANK,
    "markov_head_type": "gated", "sliding_window_non_causal": False,
}  # fmt: skip
RECURRENT = DSPARK | {"markov_head_type": "rnn"}
SPECFORGE = ZLAB | {"block_size": BLOCK - 1, "dflash_config": ZLAB["dflash_config"] | {
    "projector_type": "dspark", "attention_mode": "gqa", "markov_rank": RANK, "markov_head_type": "vanilla",
}}  # fmt: skip
DOMINO, DOMINO_SHIFTED = (
    ZLAB | {"dflash_config": ZLAB["dflash_config"] | {
        "projector_type": "domino", "emb_dim": 20, "gru_hidden_dim": 12, "pure_draft_prefix_len": 1,
        "shift_label": shifted,
    }}
    for shifted in (False, True)
)  # fmt: skip
DFLASH2 = ZLAB | SLIDING | {
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "block_size": None,
    "dflash_config": ZLAB["dflash_config"] | {
        "block_size": BLOCK, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4,
        "output_multiplier": 0.1, "final_logit_softcapping": 1.0,
    },
}  # fmt: skip
SECOND = DFLASH | {  # masks both ways are its default
    "speculators_model_type": "dflash2", "sliding_window_non_causal": None, "draft_vocab_size": VOCABULARY,
    "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": RANK, "selector_top_k": 4,
}  # fmt: skip
TABLES, D2T = ["embed_tokens", "lm_head"], ["embed_tokens", "lm_head", "d2t"]


class Meaning:
    """What a published config means. states: of the target; shift: from a slot to the token that it says, 0 for its
    own position; layers: of each whether a slot sees no further than itself, and its window; correction: by the token
    ahead; unused: slots at the end that say nothing; scale, softcap: of the logits; convolved: whether layers
    convolve if they have what it takes."""

    def __init__(self, states, shift, layers, correction=None, unused=0, scale=1.0, softcap=0.0, convolved=True):
        self.states, self.shift, self.layers, self.correction = states, shift, layers, correction
        self.unused, self.scale, self.softcap, self.convolved = unused, scale, softcap, convolved

    def but(self, **changes):
        return Meaning(**vars(self) | changes)


PUBLISHED = {  # config, its own tables, what it means
    "z-lab": (ZLAB, [], Meaning([1, 3], 0, [(False, 0), (False, 0)])),
    "z-lab-sliding": (ZLAB | SLIDING, [], Meaning([1, 3], 0, [(False, 0), (True, 6)])),
    "JetSpec": (JETSPEC, [], Meaning([1, 3], 0, [(True, 0), (True, 0)])),
    "SpecForge-DSpark": (SPECFORGE, [], Meaning([1, 3], 1, [(False, 0), (False, 0)], "vanilla")),
    "Domino": (DOMINO, [], Meaning([1, 3], 0, [(False, 0), (False, 0)], "domino")),
    "Domino-shifted": (DOMINO_SHIFTED, [], Meaning([1, 3], 1, [(False, 0), (False, 0)], "domino", unused=1)),
    "DeepSpec": (DEEPSPEC, TABLES, Meaning([0, 3], 1, [(False, 0), (False, 0)], "vanilla")),
    "DeepSpec-said": (SAID, TABLES, Meaning([0, 3], 0, [(False, 0), (False, 0)], "vanilla")),
    "speculators-dflash": (DFLASH, D2T, Meaning([1, 3], 0, [(False, 0), (False, 6)])),
    "speculators-dspark": (DSPARK, D2T, Meaning([1, 3], 1, [(False, 0), (True, 6)], "gated")),
    "DFlash2": (DFLASH2, [], Meaning([1, 3], 0, [(False, 0), (False, 6)], "selector", scale=0.1, softcap=1.0)),
    "speculators-dflash2": (SECOND, TABLES, Meaning([1, 3], 0, [(False, 0), (False, 6)], "selector")),
    "speculators-rnn": (RECURRENT, D2T, Meaning([1, 3], 1, [(False, 0), (True, 6)], "rnn")),
}


def block_tensors(config, tables=(), seed=0):
    """Random tensors for a config, with tables of its own."""
    torch.manual_seed(seed)
    shapes = {"fc": (SIZE, 2 * SIZE), "hidden_norm": SIZE, "norm": SIZE}
    for index in range(2):
        wide, narrow = (HEADS * HEAD, SIZE), (KV_HEADS * HEAD, SIZE)
        parts = {
            "self_attn.q_proj": wide, "self_attn.k_proj": narrow, "self_attn.v_proj": narrow,
            "self_attn.o_proj": wide[::-1], "self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD,
            "mlp.gate_proj": (64, SIZE), "mlp.up_proj": (64, SIZE), "mlp.down_proj": (SIZE, 64),
            "input_layernorm": SIZE, "post_attention_layernorm": SIZE,
        }  # fmt: skip
        shapes |= {f"layers.{index}.{part}": shape for part, shape in parts.items()}
    draft = 100 if "d2t" in tables else VOCABULARY
    shapes |= {"embed_tokens": (VOCABULARY, SIZE), "lm_head": (draft, SIZE)}
    shapes |= {"markov_head.markov_w1": (VOCABULARY, RANK), "markov_head.markov_w2": (draft, RANK)}
    shapes |= {"markov_head.gate_proj": (RANK, SIZE + RANK), "markov_head.joint_proj": (3 * RANK, 2 * RANK + SIZE)}
    own = config | (config.get("dflash_config") or {})
    kind = own.get("markov_head_type", "") if own.get("markov_rank") else ""
    left_out = {name for name in TABLES if name not in tables}
    left_out |= set() if kind else {"markov_head.markov_w1", "markov_head.markov_w2"}
    left_out |= {"markov_head.gate_proj"} - ({"markov_head.gate_proj"} if kind == "gated" else set())
    left_out |= {"markov_head.joint_proj"} - ({"markov_head.joint_proj"} if kind == "rnn" else set())
    tensors = {}
    if own.get("projector_type") == "domino":
        gru = torch.nn.GRU(SIZE, 12, bias=False)
        tensors |= {f"prefix_gru.{name}": tensor.detach() * 3 for name, tensor in gru.named_parameters()}
        tensors["embed_proj.0.weight"] = torch.randn(20, SIZE + 12) * 0.5
        tensors["embed_proj.2.weight"] = torch.randn(VOCABULARY, 20) * 2
    if "selector_rank" in own:
        tensors |= selector_tensors(own["conv_kernel_size"], own["conv_group_size"], VOCABULARY, RANK, SIZE)
    for name, shape in shapes.items():
        made = torch.randn(shape) * (0.8 if "markov" in name else 0.3)
        if name not in left_out:
            tensors[f"{name}.weight"] = 1 + 0.3 * made if isinstance(shape, int) else made
            if name.endswith(("gate_proj", "joint_proj")) and "markov" in name:
                tensors[f"{name}.bias"] = torch.randn(shape[0]) * 0.3
    if kind:
        tensors["confidence_head.proj.weight"] = torch.randn(1, SIZE + RANK)
    if "d2t" in tables:
        ids = torch.randperm(VOCABULARY)[:draft].sort().values
        tensors["d2t"] = ids - torch.arange(draft)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, ids, True)
    return tensors


def save_block(folder, config, tensors):
    """Write a drafter as it is published; fields that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {field: value for field, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given))
    save_file(tensors, folder / "model.safetensors")
    return folder


def idle_tensors(config, **own):
    """Tensors of a drafter whose layers add nothing, but for its own ones."""
    tensors = {name: torch.full_like(tensor, "norm" in name) for name, tensor in block_tensors(config).items()}
    return tensors | own


def turned(x):
    """Rotary embeddings of x [T, heads, HEAD] at positions 0 to T - 1."""
    angle = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, HEAD, 2) / HEAD)
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angle.cos(), angle.sin()))
    return x * cos + torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1) * sin


def plain_attention(w, name, context, x, causal, window):
    """Slots x [Q, 48] over a context [C, 48] and themselves -> [Q, 48]."""
    seen, slots, before = torch.cat([context, x]), len(x), len(context)
    q = rms((x @ w[f"{name}.q_proj.weight"].T).view(slots, -1, HEAD), w[f"{name}.q_norm.weight"])
    k = rms((seen @ w[f"{name}.k_proj.weight"].T).view(len(seen), -1, HEAD), w[f"{name}.k_norm.weight"])
    v = (seen @ w[f"{name}.v_proj.weight"].T).view(len(seen), -1, HEAD)
    q = turned(torch.cat([torch.zeros(before, HEADS, HEAD), q]))[before:]
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (turned(k), v))
    visible = torch.ones(slots, len(seen), dtype=torch.bool)
    for slot in range(slots):
        for place in range(len(seen)):
            ahead = place - before - slot  # how many places ahead of the slot
            visible[slot, place] = not (causal and ahead > 0) and (not window or -ahead < window)
    scores = (torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5).masked_fill(~visible, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w[f"{name}.o_proj.weight"].T


@torch.no_grad()
def plain_slots(w, model, tokens, depth, meaning):
    """The normed hidden states of the slots that say the next `depth` tokens."""
    states = hidden_states(model, tokens)
    features = torch.cat([states[state] for state in meaning.states], -1)[:-1]  # the root has no feature yet
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
    x = table[torch.tensor([tokens[-1], *[MASK] * (depth - meaning.shift + meaning.unused)])]
    for index, (causal, window) in enumerate(meaning.layers):
        name = f"layers.{index}."
        own = w if meaning.convolved else {}
        normed = rms(x, w[name + "input_layernorm.weight"])
        given, kernels = convolved(own, name + "attention_conv", normed)
        x = x + convolved(own, name + "attention_conv", plain_attention(
            w, name + "self_attn", context, given, causal, window
        ), kernels)[0]  # fmt: skip
        normed = rms(x, w[name + "post_attention_layernorm.weight"])
        given, kernels = convolved(own, name + "mlp_conv", normed)
        gate = torch.nn.functional.silu(given @ w[name + "mlp.gate_proj.weight"].T)
        made = (gate * (given @ w[name + "mlp.up_proj.weight"].T)) @ w[name + "mlp.down_proj.weight"].T
        x = x + convolved(own, name + "mlp_conv", made, kernels)[0]
    return rms(x, w["norm.weight"])[len(x) - meaning.unused - depth :][:depth]


@torch.no_grad()
def plain_log_probs(w, model, slots, path, meaning):
    """Log-probabilities of what follows a path of at least the root, by the drafter's tokens [V]."""
    hidden = slots[len(path) - 1]
    logits = hidden @ w.get("lm_head.weight", model.get_output_embeddings().weight).T * meaning.scale
    logits = meaning.softcap * torch.tanh(logits / meaning.softcap) if meaning.softcap else logits
    if not meaning.correction:
        return logits.log_softmax(-1)
    if meaning.correction == "selector":
        return plain_selector(w, logits, hidden, path[-1]).log_softmax(-1)
    if meaning.correction == "domino":
        return (logits + plain_domino(w, model, hidden, path)).log_softmax(-1)
    bigram = w["markov_head.markov_w1.weight"]
    out = bigram[path[-1]]
    if meaning.correction == "gated":
        both = torch.cat([hidden, out])
        out = out * torch.sigmoid(both @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"])
    if meaning.correction == "rnn":
        state = torch.zeros(RANK)
        for token, slot in zip(path, slots, strict=False):
            z = torch.cat([state, bigram[token], slot])
            gate, new, out = (z @ w["markov_head.joint_proj.weight"].T + w["markov_head.joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
        out = torch.tanh(out)
    return (logits + w["markov_head.markov_w2.weight"] @ out).log_softmax(-1)


def plain_domino(w, model, hidden, path):
    """What Domino adds to the logits behind a path, but for the first depth."""
    gru = torch.nn.GRU(SIZE, 12, bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): w[name] for name in w if "prefix_gru" in name})
    state = gru(model.get_input_embeddings()(torch.tensor(path)))[0][-1]
    inner = torch.nn.functional.silu(w["embed_proj.0.weight"] @ torch.cat([hidden, state]))
    return (w["embed_proj.2.weight"] @ inner) * (len(path) > 1)


def names(w):
    """What the drafter's tokens are called by the target."""
    return (w["d2t"] + torch.arange(len(w["d2t"]))).tolist() if "d2t" in w else list(range(VOCABULARY))


def plain_block(w, model, tokens, depth, meaning):
    """The chain after these tokens, recomputed from nothing."""
    slots, path = plain_slots(w, model, tokens, depth, meaning), [tokens[-1]]
    for _ in range(depth):
        path.append(names(w)[int(plain_log_probs(w, model, slots, path, meaning).argmax())])
    return path[1:]

"""Heads over the target's hidden states recomputed from nothing, by the book; and what an engine drafts with them."""

import torch


def rms(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def plain_head(w, embedded, hidden, window=0):
    """The head over a whole sequence, by the book: embedded, hidden [T, 48] -> (normed, hidden) [T, 48]. Two KV
    heads of 12. window: tokens that each one sees, 0 for all."""
    name = "midlayer."
    both = torch.cat(
        [rms(embedded, w[name + "input_layernorm.weight"]), rms(hidden, w[name + "hidden_norm.weight"])], -1
    )
    hidden = plain_layer(w, name, both, hidden, window)
    return rms(hidden, w["norm.weight"]), hidden


def plain_layer(w, name, x, residual, window=0):
    """A Llama layer, whose tensors' names begin with `name`, over x [T, ..], which is added to residual [T, 48]. Two KV
    heads of 12."""
    count = len(x)
    q, k, v = (
        (x @ w[f"{name}self_attn.{part}_proj.weight"].T + w.get(f"{name}self_attn.{part}_proj.bias", 0.0)).view(
            count, -1, 12
        )
        for part in "qkv"
    )
    if f"{name}self_attn.q_norm.weight" in w:
        q, k = (rms(x, w[f"{name}self_attn.{part}_norm.weight"]) for x, part in ((q, "q"), (k, "k")))
    angle = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, 12, 2) / 12)
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angle.cos(), angle.sin()))
    q, k = (x * cos + torch.cat([-x[..., 6:], x[..., :6]], -1) * sin for x in (q, k))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 12**0.5
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    if window:
        scores = scores.masked_fill(torch.ones(count, count).tril(-window).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    hidden = residual + out @ w[name + "self_attn.o_proj.weight"].T
    x = rms(hidden, w[name + "post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(x @ w[name + "mlp.gate_proj.weight"].T) * (x @ w[name + "mlp.up_proj.weight"].T)
    return hidden + gate @ w[name + "mlp.down_proj.weight"].T


def hidden_states(model, tokens):
    """The input of each layer, and the output of the last one ahead of the final norm."""
    seen = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])) for layer in model.model.layers]
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0])))
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return seen


def plain_chain(w, model, tokens, length, layers=(0, 1, 2), window=0):
    """The chain that EAGLE-3 drafts after these tokens, recomputed from nothing at every level."""
    states = hidden_states(model, tokens)
    features = torch.cat([states[layer] for layer in layers], -1)[:-1]  # the root has no feature yet
    if "input_norm.weight" in w:
        features = rms(features, w["input_norm.weight"])
    hidden, following = features @ w["fc.weight"].T, list(tokens[1:])
    drafted = []
    for _ in range(length):
        normed, out = plain_head(w, model.get_input_embeddings()(torch.tensor(following)), hidden, window)
        index = int((normed[-1] @ w["lm_head.weight"].T).argmax())
        drafted.append(index + int(w["d2t"][index]))
        following.append(drafted[-1])
        hidden = torch.cat([hidden, out[-1:]])
    return drafted


def last_hidden(model, tokens):
    """The target's hidden state behind the final norm at each token but the last, which has none yet."""
    return model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0, :-1]


def chains(engine, nodes):
    """Of each step from the second on: the tokens before it, and the chain that was drafted for it. nodes: how many
    each one verifies, None for all."""
    tokens, found = [40, 41, 42, 50, 9, 8], []
    engine.session.admit(tokens, 60, [])
    tokens = tokens + engine.session.step()[0].tokens
    for count in nodes:
        found.append((tokens, engine.session.tree(0).tokens[1:]))
        tokens = tokens + engine.session.step(count)[0].tokens
    return found


def paths_of(tree):
    """The tokens from below the root down to each node."""
    paths = {0: ()}
    for node in range(1, len(tree.tokens)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    return {path for path in paths.values() if path}

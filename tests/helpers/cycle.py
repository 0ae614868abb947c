"""A target that says one token after the other, in a circle, and what would be a perfect drafter of it.

Its embeddings are the axes, its layers add nothing: the hidden state behind its norm is the last token's axis, times a
number. So a drafter's weights can be written down, and whatever it is paired with wrongly is another token.
"""

import torch
from models import SMALL, save_model, tiny_model
from transformers import AutoModelForCausalLM

TOKENS, SIZE = 40, SMALL["hidden_size"]
FIRST = 2  # ids 0 and 1 are special, and in no answer


def after(token, count=1):
    """The token that stands `count` places behind another."""
    return (token - FIRST + count) % (TOKENS - FIRST) + FIRST


def save_cycle(folder, architecture="Llama", **changes):
    """Write the target."""
    save_model(folder, architecture, vocab_size=TOKENS, **changes)
    model = tiny_model(architecture, vocab_size=TOKENS, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(TOKENS, SIZE))
        model.get_output_embeddings().weight.copy_(to_scores())
    model.save_pretrained(folder)
    return folder


def mark_layer(folder, number):
    """Have a layer of that target add a constant in the last axis, which is no token's: hidden states ahead of it lack
    what those behind it have."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mlp = model.model.layers[number].mlp
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight, mlp.up_proj.weight):
            weight.fill_(1.0)
        mlp.down_proj.weight[-1] = 1.0
    model.save_pretrained(folder)
    return folder


def to_scores(count=1):
    """[TOKENS, SIZE]: a token's axis -> scores, the greatest that of the token `count` places behind."""
    scores = torch.eye(TOKENS, SIZE) * (torch.arange(TOKENS) < FIRST)[:, None]
    for token in range(FIRST, TOKENS):
        scores[after(token, count), token] = 1.0
    return scores


def to_axis(count=1):
    """[SIZE, SIZE]: a token's axis -> that of the token `count` places behind."""
    return torch.cat([to_scores(count), torch.zeros(SIZE - TOKENS, SIZE)])


def accepted(engine, prompt=(5, 6, 7), count=25):
    """How many drafts each step but the first, which has none, accepts; all tokens are as the target says them."""
    result = engine.generate(list(prompt), count, ignore_eos=True)
    assert result.token_ids == [after(prompt[-1], place) for place in range(1, count + 1)]
    told = {int(depth): steps for depth, steps in result.stats["accepted"].items() if steps}
    told[0] = told.get(0, 0) - 1
    return {depth: steps for depth, steps in told.items() if steps}

"""Steps of any drafter over recorded answers, greedy or sampled: the target answers from the record, in seconds.

The step and the prefill are the engine's own modules, run eagerly; only the target is replaced.
"""

import torch
from specstep.graphs.prefill import Prefill
from specstep.graphs.state import row_state
from specstep.graphs.step import SpeculativeStep
from specstep.report import RUNNING
from specstep.train.data.hidden_states import hidden_states


class RecordedTarget(torch.nn.Module):
    """Stands for `CausalLM`: says at each position what was recorded after it."""

    layers = 0

    def __init__(self, texts, features, vocabulary):
        """texts: [B] lists of token ids; features: a [T, F] per text, or None."""
        super().__init__()
        longest = max(map(len, texts)) + 80
        self.after = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            self.after[row, : len(text) - 1] = torch.tensor(text[1:])
        self.features, self.vocabulary, self.rows = None, vocabulary, slice(None)
        if features is not None:
            self.features = torch.zeros(len(texts), longest, features[0].shape[1], dtype=features[0].dtype)
            for row, captured in enumerate(features):
                self.features[row, : len(captured)] = captured

    def forward(self, tokens, where, keys, values):
        place = where.positions.expand(tokens.shape[0], -1).clamp(max=self.after.shape[1] - 1)
        self.choice = self.after[self.rows].gather(1, place)
        logits = torch.zeros(1, 1, 1).expand(*tokens.shape, self.vocabulary)  # nobody looks at them
        if self.features is None:
            return logits, None
        captured = self.features[self.rows]
        return logits, captured.gather(1, place[:, :, None].expand(-1, -1, captured.shape[2]))


@torch.no_grad()
def replay(source, drafter, answers, rows=12, temperature=0.0):
    """{id: [tokens of each step]} for answers with id, prompt_token_ids, token_ids, and seed if they were sampled. At
    their own temperature the drafter knows the noise that they were sampled with; at 0 it is blind to it."""
    texts = [answer["prompt_token_ids"] + answer["token_ids"] for answer in answers]
    captured = dict.fromkeys(range(len(texts)))
    if drafter.scorer.feature_layers:
        captured = {i: hidden for i, hidden, _ in hidden_states(source, texts, drafter.scorer.feature_layers)}
    found = {}
    for start in range(0, len(texts), rows):
        some = range(start, min(start + rows, len(texts)))
        features = None if captured[start] is None else [captured[i] for i in some]
        target = RecordedTarget(
            [texts[i] for i in some], features, source.model.get_output_embeddings().weight.shape[0]
        )
        starts = [len(answers[i]["prompt_token_ids"]) for i in some]
        dtype, seeds = next(source.model.parameters()).dtype, [answers[i].get("seed") or 0 for i in some]
        steps = _replay(target, drafter, [texts[i] for i in some], starts, dtype, temperature, seeds)
        found |= {answers[i]["id"]: counts for i, counts in zip(some, steps, strict=True)}
    return found


def _replay(target, drafter, texts, starts, dtype, temperature, seeds):
    batch, slots = len(texts), target.after.shape[1]
    declared = row_state(slots, drafter.nodes, target.vocabulary) | drafter.scorer.state(drafter.shape)
    state = {name: torch.full((batch, *t.shape), t.fill, dtype=t.dtype) for name, t in declared.items()}
    shared = {name: torch.full(t.shape, t.fill, dtype=t.dtype) for name, t in drafter.scorer.shared().items()}
    layers = drafter.scorer.cache_layers()
    keys = [torch.zeros(batch, layer.heads, slots, layer.key_size, dtype=dtype) for layer in layers]
    values = [torch.zeros(batch, layer.heads, slots, layer.value_size, dtype=dtype) for layer in layers]
    if not layers:  # the step reads the slots in use from a cache
        keys = values = [torch.zeros(batch, 1, slots, 1)]
    prefill = Prefill(target, drafter.scorer, slots)
    step = SpeculativeStep(target, drafter, choice=lambda *_: target.choice)
    state["learning"][:] = 0
    state["sampling"][:, 0], state["seeds"][:] = temperature, torch.tensor(seeds)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        rows = target.rows = slice(row, row + 1)
        state["history"][row, :start] = torch.tensor(text[:start])
        state["limits"][row], state["finish"][row] = len(text), RUNNING
        state["prompt_lengths"][row] = start
        if start == 1:  # the step itself processes a prompt's last token
            continue
        views = ([k[rows] for k in keys], [v[rows] for v in values])
        tokens, count = torch.tensor([text[: start - 1]]), torch.tensor([start - 1])
        after = prefill(tokens, count, {n: t[rows] for n, t in state.items()} | shared, *views)
        for name, value in after.items():
            state[name][rows] = value
    target.rows, counts = slice(None), [[] for _ in texts]
    while (state["finish"] == RUNNING).any():
        given = state | shared | {"catch_up": torch.arange(drafter.depth + 2)}
        report, after = step(torch.arange(drafter.nodes + 1), given, keys, values)
        state |= {name: after[name] for name in after.keys() & state.keys()}
        for row, count in enumerate(report[:, 0].tolist()):
            counts[row] += [count] if count else []
    return counts

"""Everything that sessions of different backends must agree on."""

import numpy as np

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9]]
EVERYTHING = {
    "sampling": [0.8, 40, 0.9, 0.02, 1.2, 0.3, 0.1], "seeds": 2**40 + 7, "min_lengths": 40, "bias_ids": [50, 60],
    "bias": [1.5, float("-inf")], "banned_words": [[-1] * 6 + [40, 41], [-1] * 5 + [9, 9, 9]], "masked": 1,
}  # fmt: skip


def steps(engine, prompts, new_tokens=40):
    """Every integer a session produces: report after report, state after state."""
    session = engine.session
    mask = next(tensor.shape[1:] for tensor in session.spec.state if tensor.name == "allowed")
    everything = EVERYTHING | {"allowed": np.full(mask, 0x6DB6DB6D, np.int32)}  # two tokens of three
    for place, prompt in enumerate(prompts):  # a greedy row beside one that asks for everything
        session.admit(prompt, len(prompt) + new_tokens, [1], everything if place % 2 else {})
    seen = []
    while any(finish == 0 for finish in session.state["finish"].tolist()):
        seen.append({row: tuple(report) for row, report in session.step().items()})
        seen.append({name: session.state[name].tolist() for name in ("lengths", "finish")})
    for row in range(len(prompts)):
        session.release(row)
    return seen


def agree(engines, rows=2):
    """All engines produce the same integers, with prompts in as many rows as they have."""
    for start in range(0, len(PROMPTS), rows):
        first, *others = [steps(engine, PROMPTS[start : start + rows]) for engine in engines]
        assert len(first) > 4
        assert all(other == first for other in others)

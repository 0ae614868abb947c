"""Everything that sessions of different backends must agree on."""

import numpy as np
from specstep.report import SCORE_STEPS

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9]]
EVERYTHING = {
    "sampling": [0.8, 40, 0.9, 0.02, 1.2, 0.3, 0.1], "seeds": 2**40 + 7, "min_lengths": 40, "bias_ids": [50, 60],
    "bias": [1.5, float("-inf")], "banned_words": [[-1] * 6 + [40, 41], [-1] * 5 + [9, 9, 9]], "masked": 1,
}  # fmt: skip


def steps(engine, prompts, new_tokens=40):
    """Every integer a session produces, report after report, state after state; and the scores of what it drafts."""
    session = engine.session
    mask = next(tensor.shape[1:] for tensor in session.spec.state if tensor.name == "allowed")
    everything = EVERYTHING | {"allowed": np.full(mask, 0x6DB6DB6D, np.int32)}  # two tokens of three
    for place, prompt in enumerate(prompts):  # a greedy row beside one that asks for everything
        session.admit(prompt, len(prompt) + new_tokens, [1], everything if place % 2 else {})
    seen, scores = [], []
    while any(finish == 0 for finish in session.state["finish"].tolist()):
        reports = session.step()
        scores += [report.scores for report in reports.values()]
        seen.append({row: tuple(report._replace(scores=None)) for row, report in reports.items()})
        seen.append({name: session.state[name].tolist() for name in ("lengths", "finish")})
    for row in range(len(prompts)):
        session.release(row)
    return seen, np.array(scores) / SCORE_STEPS


def agree(engines, rows=2):
    """All engines produce the same integers, with prompts in as many rows as they have, and nearly the same scores."""
    for start in range(0, len(PROMPTS), rows):
        (first, scores), *others = [steps(engine, PROMPTS[start : start + rows]) for engine in engines]
        assert len(first) > 4
        for other, its_scores in others:
            assert other == first
            np.testing.assert_allclose(its_scores, scores, atol=1e-3)

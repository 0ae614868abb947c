"""Everything that sessions of different backends must agree on."""

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9]]
# A greedy row beside a sampled one.
CONTROLS = [{}, {"sampling": [0.8, 40, 0.9, 0.02, 1.2, 0.3, 0.1], "seeds": 2**40 + 7}]


def steps(engine, prompts, new_tokens=40):
    """Every integer a session produces: report after report, state after state."""
    session = engine.session
    for place, prompt in enumerate(prompts):
        session.admit(prompt, len(prompt) + new_tokens, [1], CONTROLS[place % 2])
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

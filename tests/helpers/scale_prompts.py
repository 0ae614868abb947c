"""What is asked of replicas, and of one engine."""

ASKED = [
    {"prompt": [5 + at, 40 + at], "max_new_tokens": 24 + 4 * at, "sampling": sampling}
    for at, sampling in enumerate(
        [{}, {"temperature": 1.0, "seed": 7}, {"top_k": 5, "temperature": 0.8, "seed": 3}] * 3
    )
]

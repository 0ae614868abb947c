"""What a request may ask of the graph: the state tensors that a session writes once for a row, and their bounds.

Zeros, and what the tensors are filled with, ask for nothing: a greedy row.
"""

from typing import Any, NamedTuple

STOP_IDS = 16  # stop tokens that a row can have
BIASES = 512  # tokens whose logits a row can change, banned ones included
BANNED_WORDS, WORD_TOKENS = 64, 8  # banned sequences of a row, and most tokens of one
TOP_LOGPROBS = 20  # most alternatives whose log-probabilities are reported
LAG = 8  # most tokens that a drafter which paused processes later; it goes without those before them
ALL_TOKENS = -1  # a word of the allowed-token mask with every bit set
# The table in which n-gram drafters count what an engine writes (kernels/ngram/learned.py): its rows by default; an
# entry is (tag * LEARNED_TOKENS + token) * LEARNED_COUNTS + count.
LEARNED_ROWS, LEARNED_TOKENS, LEARNED_COUNTS = 16384, 2**20, 256
MOST_LEARNED_ROWS = 2**24
MOST_LOOKAHEAD = 32  # of a drafter: tokens past its own that a slot of its caches may depend on


def most_catch_up(depth: int) -> int:
    """The most positions that a drafter which pauses processes in a step. For a depth of 4 they are 18: LAG, 8, that it
    left out, 5 of this step's path, and room for 5 rejected ones behind."""
    return LAG + 2 * (depth + 1)


class Sampling(NamedTuple):
    """The columns of the state tensor `sampling`, float32. 0 turns any of them off."""

    temperature: Any  # the logits are divided by it; 0: greedy
    top_k: Any  # how many of the likeliest tokens are kept
    top_p: Any  # the kept tokens have this probability together
    min_p: Any  # least share of the likeliest token's probability
    repetition_penalty: Any  # of tokens in prompt or output
    presence_penalty: Any  # subtracted once for a token of the output
    frequency_penalty: Any  # subtracted for each time it is there

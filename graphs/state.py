"""The state that a step takes and hands on. Small tensors are returned anew; KV tensors and the history are written
in place.

Letters: B batch rows, S cache slots, T nodes of a draft tree, the root included, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..controls import ALL_TOKENS, BANNED_WORDS, BIASES, STOP_IDS, WORD_TOKENS, Sampling
from ..kernels.bits import word_count
from ..report import FREE

State = dict[str, Tensor]


class StateTensor(NamedTuple):
    """One state tensor: its shape without the batch dimension, which one that all rows share does not have, its dtype,
    the value an empty row holds, whether it is written in place rather than returned anew, and whether a recurrent
    layer keeps it: every token so far is in it, and it cannot be cut back to fewer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0
    in_place: bool = False
    recurrent: bool = False


def row_state(slots: int, nodes: int, vocabulary: int) -> dict[str, StateTensor]:
    """The state of the step itself; drafters add their own.

    history: prompt and output tokens, the root at index `lengths`; lengths: tokens in the KV cache; limits: most
    tokens, prompt included, that the row may reach; finish: a code of `report`; tree_tokens and tree_parents: the tree
    that the step verifies, see `tree.drafted_tree`.
    """
    return {
        "history": StateTensor((slots,), torch.int64, in_place=True),
        "lengths": StateTensor((), torch.int64),
        "limits": StateTensor((), torch.int64),
        "finish": StateTensor((), torch.int64, FREE),
        "tree_tokens": StateTensor((nodes + 1,), torch.int64),
        "tree_parents": StateTensor((nodes + 1,), torch.int64, -1),
    } | request_state(slots, nodes, vocabulary)


def near(state: State, keys: Sequence[Tensor]) -> State:
    """The state with what is searched for matches cut to the slots in use, which the keys [B, H_kv, S, D] tell: a step
    costs what it holds. Without keys it stays whole."""
    if not keys:
        return state
    slots = keys[0].shape[2]
    return state | {name: state[name][:, :slots] for name in ("history", "prediction")}


def request_state(slots: int, nodes: int, vocabulary: int) -> dict[str, StateTensor]:
    """What a request asks for; a step reads it only.

    prediction: tokens that the answer may repeat, prediction_lengths of them; prompt_lengths: tokens of the prompt;
    min_lengths: tokens, prompt included, below which a row does not stop; sampling: the columns of `controls.Sampling`;
    seeds: not negative; bias is added to the logits of bias_ids; the last token of one of banned_words [words, tokens],
    aligned to the right, does not follow the others; logprobs: how many alternatives are reported beside each token's
    log-probability, -1 for neither; allowed: packed bits of the tokens that may follow each node, where masked is not
    0; learning: whether what the row writes may be counted for others. -1 stands for no token.
    """
    return {
        "stop_ids": StateTensor((STOP_IDS,), torch.int64, -1),
        "prediction": StateTensor((slots,), torch.int64, -1),
        "prediction_lengths": StateTensor((), torch.int64),
        "prompt_lengths": StateTensor((), torch.int64),
        "min_lengths": StateTensor((), torch.int64),
        "sampling": StateTensor((len(Sampling._fields),), torch.float32),
        "seeds": StateTensor((), torch.int64),
        "bias_ids": StateTensor((BIASES,), torch.int64, -1),
        "bias": StateTensor((BIASES,), torch.float32),
        "banned_words": StateTensor((BANNED_WORDS, WORD_TOKENS), torch.int64, -1),
        "logprobs": StateTensor((), torch.int64, -1),
        "masked": StateTensor((), torch.int64),
        "learning": StateTensor((), torch.int64, 1),
        "allowed": StateTensor((nodes + 1, word_count(vocabulary)), torch.int32, ALL_TOKENS),
    }

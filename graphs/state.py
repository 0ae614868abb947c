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
    """One state tensor."""

    shape: tuple[int, ...]  # of a row; of a tensor that all rows share, the whole shape
    dtype: torch.dtype
    fill: int = 0  # value in a row without a request
    in_place: bool = False  # a step writes it where it lies, and does not return it
    recurrent: bool = False  # a recurrent layer keeps it: it holds every token so far and cannot be cut back


def row_state(slots: int, nodes: int, vocabulary: int) -> dict[str, StateTensor]:
    """The state of the step itself; drafters add their own."""
    return {
        "history": StateTensor((slots,), torch.int64, in_place=True),  # prompt and output; the root at index `lengths`
        "lengths": StateTensor((), torch.int64),  # tokens in the KV cache
        "limits": StateTensor((), torch.int64),  # most tokens of the row, prompt included
        "finish": StateTensor((), torch.int64, FREE),  # a finish code of `report`
        "tree_tokens": StateTensor((nodes + 1,), torch.int64),  # tokens of the tree to verify, see `tree.drafted_tree`
        "tree_parents": StateTensor((nodes + 1,), torch.int64, -1),  # each node's parent; -1: the root, or no node
    } | request_state(slots, nodes, vocabulary)


def near(state: State, keys: Sequence[Tensor]) -> State:
    """The state with what is searched for matches cut to the slots in use, which the keys [B, H_kv, S, D] tell: a step
    costs what it holds. Without keys it stays whole."""
    if not keys:
        return state
    slots = keys[0].shape[2]
    return state | {name: state[name][:, :slots] for name in ("history", "prediction")}


def request_state(slots: int, nodes: int, vocabulary: int) -> dict[str, StateTensor]:
    """What a request asks for; a step reads it only."""
    return {
        "stop_ids": StateTensor((STOP_IDS,), torch.int64, -1),  # tokens that end the output; -1: none
        "prediction": StateTensor((slots,), torch.int64, -1),  # tokens that the answer may repeat; -1: none
        "prediction_lengths": StateTensor((), torch.int64),  # how many of them there are
        "prompt_lengths": StateTensor((), torch.int64),  # tokens of the prompt
        "min_lengths": StateTensor((), torch.int64),  # tokens, prompt included, below which no stop token is chosen
        "sampling": StateTensor((len(Sampling._fields),), torch.float32),  # the columns of `controls.Sampling`
        "seeds": StateTensor((), torch.int64),  # of the noise, not negative
        "bias_ids": StateTensor((BIASES,), torch.int64, -1),  # tokens whose logits are changed; -1: none
        "bias": StateTensor((BIASES,), torch.float32),  # what is added to the logit of each
        # Right-aligned: the last token of one may not follow its others; -1: none.
        "banned_words": StateTensor((BANNED_WORDS, WORD_TOKENS), torch.int64, -1),
        # Likely tokens reported beside each new one; -1: no log-probabilities at all.
        "logprobs": StateTensor((), torch.int64, -1),
        "masked": StateTensor((), torch.int64),  # not 0: `allowed` applies
        "learning": StateTensor((), torch.int64, 1),  # not 0: the learned table may count what the row writes
        # Packed bits: the tokens that may follow each node.
        "allowed": StateTensor((nodes + 1, word_count(vocabulary)), torch.int32, ALL_TOKENS),
    }

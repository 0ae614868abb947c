"""The state that a step takes and hands on. Small tensors are returned anew; KV tensors and the history are written
in place.

Letters: B batch rows, S cache slots, D greatest depth of a draft tree.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..report import FREE

STOP_IDS = 16  # stop tokens a row can have

State = dict[str, Tensor]


class StateTensor(NamedTuple):
    """One state tensor: its shape without the batch dimension, its dtype, and the value an empty row holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: int = 0


def row_state(slots: int) -> dict[str, StateTensor]:
    """The state of the step itself; drafters add their own.

    history: prompt and output tokens, the root at index `lengths`; lengths: tokens in the KV cache; limits: most
    tokens, prompt included, that the row may reach; finish: a code of `report`; stop_ids: padded with -1.
    """
    return {
        "history": StateTensor((slots,), torch.int64),
        "lengths": StateTensor((), torch.int64),
        "limits": StateTensor((), torch.int64),
        "finish": StateTensor((), torch.int64, FREE),
        "stop_ids": StateTensor((STOP_IDS,), torch.int64, -1),
    }

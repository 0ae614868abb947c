"""What a kind of drafter says of itself, so that it can be trained."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...compile.source import Source
from .options import TrainOptions
from .unroll import Levels, TrainingBatch


class Wanted(NamedTuple):
    """What a new drafter is made for. feature_layers: indices of the target's hidden states that it reads; vocabulary
    [V] int64: the target's ids of its tokens, ascending; mask: the id that stands for a token not known yet."""

    target: Source
    feature_layers: tuple[int, ...]
    vocabulary: Tensor
    mask: int
    options: TrainOptions


class Kind(NamedTuple):
    """new: a drafter whose layers add nothing yet; going_on: one from a folder, a target and a mask, see `Wanted`;
    begin: sets of some batches what shall not begin at random, of a drafter that is fresh or not; levels: see `unroll`;
    save: writes it into a folder, in a published format.

    A drafter has `fc` over the features, a last `norm`, an `lm_head` over the draft vocabulary, `config.feature_layers`
    and `target_ids()`.
    """

    new: Callable[[Wanted], Any]
    going_on: Callable[[str, Source, int, TrainOptions], Any]
    begin: Callable[[Any, Iterable[TrainingBatch], bool], None]
    levels: Levels
    save: Callable[[Path, Any, Source], None]

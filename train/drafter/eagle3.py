"""EAGLE-3's training-time test: the head drafts level after level from its own output, as it will in a step.

At level 0 position t holds the target's feature at t and token t + 1. At level k it holds the head's own output of the
level before and token t + 1 + k. What a step keeps of the text is what level 0 makes of it.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2.
"""

from torch import Tensor, nn

from ...compile.drafters.eagle3_file import is_eagle3, read_head, save_eagle3
from ...compile.drafters.peagle_file import is_peagle
from ...compile.source import Source
from ...errors import InputError
from ...graphs.drafters.eagle3 import Eagle3Config, Eagle3Head
from .initialize import adding_nothing, fit_features, layer_like
from .kind import Kind, Wanted
from .options import TrainOptions
from .unroll import TrainingBatch, TrainingPass


def new_head(wanted: Wanted) -> Eagle3Head:
    layer, target_hidden = layer_like(wanted), wanted.target.model.config.get_text_config().hidden_size
    config = Eagle3Config(layer, len(wanted.vocabulary), target_hidden, wanted.feature_layers)
    head: Eagle3Head = adding_nothing(Eagle3Head(config), wanted)
    return head


def going_on(name: str, target: Source, mask: int, options: TrainOptions) -> Eagle3Head:
    """A trained head for the target, on its device. Raises BuildError, and InputError for what is no head."""
    if not is_eagle3(name) or is_peagle(name):
        raise InputError(f"start: expected an EAGLE-3 head (a folder with its config.json and weights), got {name}")
    head, embeddings = read_head(name, target)
    check_start(name, head, embeddings, options)
    if head.config.feedback_unsaid:
        raise InputError(
            f"start: {name}: norm_feedback: expected true or false in its config.json, whose norm_output leaves open "
            "whether the hidden state is fed back behind the norm or ahead of it, got none; a build with this head "
            "says which fits"
        )
    return head.to(target.model.device)


def check_start(name: str, head: Eagle3Head, embeddings: Tensor | None, options: TrainOptions) -> None:
    """Refuse a head that has embeddings of its own, which nothing here trains, or sees less than a row. Raises
    InputError."""
    if embeddings is not None:
        raise InputError(f"start: {name}: expected a head that reads the target's embeddings, got one with its own")
    short = [window for window in head.config.windows if 0 < window < options.width + options.levels]
    if short:
        raise InputError(
            f"start: {name}: sliding_window: expected none, or one of at least width + levels tokens, "
            f"{options.width + options.levels}, got {short[0]}; lower --width"
        )


def levels(head: Eagle3Head, embed: nn.Module, batch: TrainingBatch, count: int) -> list[Tensor]:
    where, hidden, logits = TrainingPass(batch.sequence), head.fuse(batch.features), []
    for level in range(count):
        normed, hidden = head(embed(batch.ahead(level + 1)).to(hidden.dtype), hidden, where, where)
        logits.append(head.logits(normed))
    return logits


EAGLE3 = Kind(new_head, going_on, fit_features, levels, save_eagle3)

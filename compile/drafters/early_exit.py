"""The first layers of the target as a draft model, with the target's own norm and head behind them.

Source: LayerSkip (arXiv 2404.16710). It pays for models that were trained to say the next token early.
"""

import copy
import re
from typing import Any

from torch import nn

from ...errors import BuildError
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.vocabulary import SameTokens
from ...graphs.kept import cache_layers
from ...graphs.target import CausalLM
from ..source import Source

NAME = re.compile(r"early-exit:(.*)")


def load_early_exit(name: str, target: Source) -> DraftModel:
    """early-exit:N -> a draft model of the target's first N layers, which shares its weights and has caches of its own.
    Raises BuildError."""
    model, count = target.model, target.model.config.get_text_config().num_hidden_layers
    asked = NAME.fullmatch(name)
    first = int(asked[1]) if asked and asked[1].isdecimal() else 0
    if not 1 <= first < count:
        raise BuildError(
            f"drafter: early-exit: expected from 1 to {count - 1} of the target's {count} layers, as early-exit:"
            f"{max(1, count // 4)}, got {name!r}"
        )
    short = _first_layers(model, first)
    vocabulary, embedded = model.get_output_embeddings().weight.shape[0], model.get_input_embeddings().num_embeddings
    return DraftModel(CausalLM(short), cache_layers(short), SameTokens(vocabulary, embedded))


def _first_layers(model: Any, count: int) -> Any:
    """A model of the first layers of another. Its tensors are those of the other; its modules and its config are not.
    Raises BuildError."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    short = copy.deepcopy(model, shared)
    decoder, config = short.get_decoder(), short.config.get_text_config()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise BuildError(f"drafter: early-exit: expected a model with a list of layers, got {type(model).__name__}")
    decoder.layers = decoder.layers[:count]
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    return short

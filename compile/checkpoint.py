"""A checkpoint of transformers: what of it is not read is harmless, or refused by name."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..errors import BuildError
from ..progress import OnProgress

# Tensors of a checkpoint that change no logit, and why.
HARMLESS = (
    r".*\.inv_freq",  # frequencies that follow from the config
    r".*\.attn\.(masked_)?bias",  # GPT-2's causal masks
    r"(.*\.)?mtp(_\w+)?\..*",  # a drafter of several tokens
    r"(.*\.)?(vision_\w+|visual|audio_\w+|multi_modal_projector|mm_projector)(\..*)?",  # for images and sound
    r"(.*\.)?embed_(vision|audio)\..*",
)


def check_all_taken(name: str, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Refuse a checkpoint with a tensor that the model does not take, unless it is harmless. Raises BuildError."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    tied = getattr(model.config, "tie_word_embeddings", False)  # not every config has the field
    harmless = re.compile("|".join(HARMLESS + ((r"lm_head\.weight",) if tied else ())))
    drafts = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")  # layers behind the last predict further tokens
    odd = [
        key
        for key in sorted(unexpected)
        if not harmless.fullmatch(key) and not ((found := drafts.fullmatch(key)) and int(found[1]) >= layers)
    ]
    if odd:
        got = ", ".join(odd[:3]) + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
        raise BuildError(
            f"model: {name}: expected tensors that {type(model).__name__} takes, got {got}; a bias "
            "wants a config that asks for it (attention_bias, mlp_bias)"
        )


def note_tokens(tokenizer: Any, stop_ids: Sequence[int], rows: int, progress: OnProgress) -> None:
    """Say what of a model's tokens will not work. rows: of its embedding."""
    if far := [id for id in stop_ids if id >= rows]:
        progress(f"note: eos_token_id: expected ids below {rows}, got {far}: no answer ends with it")
    if tokenizer is None:
        return
    if unseen := sorted(token for token, id in tokenizer.get_vocab().items() if id >= rows):
        got = ", ".join(unseen[:3])
        progress(f"note: expected tokens of the {rows} rows of the embedding, got {got}: no prompt can hold it")
    if not tokenizer.chat_template:
        progress("note: the model has no chat template: the engine takes raw prompts alone")

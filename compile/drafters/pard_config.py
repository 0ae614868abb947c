"""What config.json of a draft model says of drafting all depths in one pass, as PARD's training writes it."""

from ...errors import BuildError
from ..source import Source


def mask_token(source: Source) -> int | None:
    """The id of the token that stands for one which is not known yet; None for a model that drafts token by token.
    Raises BuildError."""
    config = source.model.config.get_text_config()
    kind, mask = getattr(config, "spd_type", None), getattr(config, "pard_token", None)
    if kind not in (None, "pard", "pard2"):
        raise BuildError(
            f"drafter: {source.name}: spd_type: expected pard, pard2 or none, got {kind!r}; take a PARD model or an "
            "ordinary one"
        )
    if mask is None and kind is None and not getattr(config, "pard2", False):
        return None
    rows: int = source.model.get_input_embeddings().weight.shape[0]
    if type(mask) is not int or not 0 <= mask < rows:
        raise BuildError(
            f"drafter: {source.name}: pard_token: expected the mask token's id, 0 to {rows - 1}, got {mask!r}; it "
            "is what the model was trained with (unused_tokenids)"
        )
    return mask

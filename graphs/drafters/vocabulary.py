"""What the target's tokens are to a drafter's model, and the other way round. Letters: V tokens of the target, W of the
drafter, C in common."""

from torch import Tensor, nn

from .frontier import embeddable


class SameTokens(nn.Module):
    """A drafter with the target's tokenizer: an id means the same to both. Either may know more ids than the other, for
    vocabularies are padded."""

    ids: Tensor | None = None

    def __init__(self, vocabulary: int, embedded: int):
        """vocabulary: the target's; embedded: how many ids the drafter has embeddings for."""
        super().__init__()
        self.vocabulary, self.embedded = vocabulary, embedded

    def read(self, tokens: Tensor) -> Tensor:
        """The target's token ids -> what the drafter is given for them."""
        return embeddable(tokens, self.embedded)

    def draftable(self, logits: Tensor) -> Tensor:
        """The drafter's logits [B, F, W] -> those of tokens that the target has; `ids` are its names for them, None for
        their own numbers."""
        return logits[..., : self.vocabulary]


class CommonTokens(nn.Module):
    """A drafter with another tokenizer: it drafts only tokens that stand for the same text in both vocabularies, and is
    given a token of its own for each of the target's, which keeps positions.

    Lossless, for the target decides what is accepted. Source: token-level intersection (arXiv 2502.05202).
    """

    def __init__(self, given: Tensor, drafted: Tensor, ids: Tensor, said: str = ""):
        """given [V] int64: what the drafter is given for each of the target's tokens; drafted, ids [C] int64: the
        common tokens as the drafter and as the target call them; said: how much that is, for people."""
        super().__init__()
        self.said = said
        self.given: Tensor
        self.drafted: Tensor
        self.ids: Tensor
        self.register_buffer("given", given)
        self.register_buffer("drafted", drafted)
        self.register_buffer("ids", ids)

    def read(self, tokens: Tensor) -> Tensor:
        """As `SameTokens.read`."""
        return self.given[tokens]

    def draftable(self, logits: Tensor) -> Tensor:
        """As `SameTokens.draftable`: [B, F, C]."""
        return logits.index_select(2, self.drafted)

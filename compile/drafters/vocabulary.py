"""Which tokens of a drafter's tokenizer stand for the same text as tokens of the target's."""

import torch

from ...errors import BuildError
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.drafter import Drafter
from ...graphs.drafters.merged import parts
from ...graphs.drafters.vocabulary import CommonTokens, SameTokens
from ...runtime.text.token_text import BYTE, TokenText
from ...runtime.text.tokenizer import EngineTokenizer
from ..source import Source

LEAST_SHARE = 0.5  # of the tokens of SAMPLE; with fewer, hardly two drafts in a row can be right
# What is written most: prose, figures, and code. How often a token occurs says more than how many there are.
SAMPLE = '''The old bridge over the river was built in 1874, and for a long time it was the only way into the town. When
the water rises in spring, people still come here to watch it: "You can hear the stones move," they say. What does it
cost to keep such a bridge? About $12,500 a year, or 3.5% of what the town spends on its roads; a new one would need 40
times as much. First, the council asked for reports. Second, it compared them. The answer is therefore simple: repair
it now.

def read_lines(path: str, limit: int = 100) -> list[str]:
    """Return the first lines of a file."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\\n") for index, line in enumerate(file) if index < limit]

for (let i = 0; i < items.length; i++) {
    if (items[i] !== null && items[i].name == "total") { console.log(`Sum: ${items[i].value}`); }
}
'''


def tokens_between(target: Source, drafter: Source) -> SameTokens | CommonTokens:
    """What the target's tokens are to a drafter's model. Raises BuildError for vocabularies that have too little in
    common, or cannot be compared."""
    heads = [source.model.get_output_embeddings().weight.shape[0] for source in (target, drafter)]
    if target.tokenizer and drafter.tokenizer:
        if target.tokenizer.get_vocab() != drafter.tokenizer.get_vocab():
            return common_tokens(target, drafter)
    elif heads[0] != heads[1]:
        raise BuildError(
            f"drafter: {drafter.name}: expected a vocabulary of {heads[0]}, as {target.name}, got {heads[1]}; to have "
            "them compared, give both models a tokenizer"
        )
    return SameTokens(heads[0], drafter.model.get_input_embeddings().num_embeddings)


def common_tokens(target: Source, drafter: Source) -> CommonTokens:
    """The tokens that stand for the same in two vocabularies. For any other token of the target, the drafter is given
    the longest of its own that the text ends with: of what was tried, most is accepted then (bench/LOG.md). Raises
    BuildError."""
    ours, theirs = Vocabulary(target), Vocabulary(drafter)
    controls = same_controls(ours, theirs)
    ids = {id: ours.texts[text] for text, id in theirs.texts.items() if text in ours.texts}
    for own, other in controls.items():
        ids.setdefault(other, own)
    sample = target.tokenizer.backend_tokenizer.encode(SAMPLE, add_special_tokens=False).ids
    share = len([token for token in sample if token in {*ids.values()}]) / len(sample)
    said = f"{len(ids):,} of {theirs.size:,} tokens in common with the target, {share:.0%} of those of a sample text"
    if share < LEAST_SHARE:
        raise BuildError(
            f"drafter: {drafter.name}: expected a tokenizer like that of {target.name}, with {LEAST_SHARE:.0%} of the "
            f"tokens of a sample text, got another with {said}; take a drafter of the target's family"
        )
    given = torch.full((max(ours.rows),), theirs.unknown)
    for id, text in ours.bytes_of.items():
        given[id] = controls[id] if id in controls else theirs.nearest(text)
    drafted = sorted(ids)
    return CommonTokens(given, torch.tensor(drafted), torch.tensor([ids[id] for id in drafted]), said)


def said_in_common(drafter: Drafter) -> list[str]:
    """A line for each of a drafter's models with another tokenizer than the target's: how much they have in common."""
    found = [part.tokens for part in parts(drafter.scorer) if isinstance(part, DraftModel)]
    return [tokens.said for tokens in found if isinstance(tokens, CommonTokens)]


class Vocabulary:
    """A tokenizer's tokens by what they stand for. Control tokens, as those that begin and end a text, have names and
    stand for no text: an ordinary word that is spelled as one is something else."""

    def __init__(self, source: Source):
        tokenizer, model = source.tokenizer, source.model
        self.rows = [table.weight.shape[0] for table in (model.get_input_embeddings(), model.get_output_embeddings())]
        words = EngineTokenizer(tokenizer.backend_tokenizer, None, {})
        text, names = TokenText(words), tokenizer.get_vocab()
        # The bytes of SentencePiece first: where a word stands for the same, it is the one that texts are written with.
        known = sorted((not BYTE.fullmatch(name), id) for name, id in names.items() if id < min(self.rows))
        self.size = len(known)
        self.bytes_of = {id: text.of(id) for _, id in known}
        self.roles = (tokenizer.eos_token_id, tokenizer.bos_token_id)
        controls = words.special_ids.union(self.roles) & self.bytes_of.keys()
        self.controls = {self.bytes_of[id]: id for id in controls}
        self.texts = {text: id for id, text in self.bytes_of.items() if text and id not in controls}
        fallbacks = (tokenizer.unk_token_id, *self.roles, 0)
        self.unknown: int = next(id for id in fallbacks if id is not None and id < min(self.rows))

    def nearest(self, text: bytes) -> int:
        """The token of the longest end of a text that is one."""
        ends = (text[start:] for start in range(len(text)))
        return next((self.texts[end] for end in ends if end in self.texts), self.unknown)


def same_controls(ours: Vocabulary, theirs: Vocabulary) -> dict[int, int]:
    """Control tokens of one vocabulary -> those of another: of the same name, else the one that also ends a text, or
    begins it."""
    found = {id: theirs.controls[name] for name, id in ours.controls.items() if name in theirs.controls}
    for own, other in zip(ours.roles, theirs.roles, strict=True):
        if own in ours.controls.values() and other in theirs.controls.values():
            found.setdefault(own, other)
    return found

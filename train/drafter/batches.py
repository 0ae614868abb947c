"""Training batches: sequences laid end to end, cut into rows of one length, so that every batch has the same shape."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...compile.source import Source
from ..data.corpus import read
from ..data.hidden_states import hidden_states
from ..data.reader import Data, Example
from .unroll import TrainingBatch


class TokensOnly:
    """Sequences of JSON-lines files, in the form of `Data`: no hidden states are kept with them."""

    def __init__(self, file: str, source: Source):
        vocabulary = source.model.get_output_embeddings().weight.shape[0]
        texts = [text for text in read([file], source.tokenizer, vocabulary) if text.tokens]
        self._tokens = [torch.tensor(text.tokens, dtype=torch.int32) for text in texts]
        self.lengths = torch.tensor([len(tokens) for tokens in self._tokens], dtype=torch.int64)
        self.prompts = torch.tensor([text.prompt for text in texts], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._tokens)

    def texts(self) -> Iterator[tuple[Tensor, int]]:
        """Tokens [T] and prompt of each sequence."""
        return zip(self._tokens, self.prompts.tolist(), strict=True)

    def __getitem__(self, index: int) -> Example:
        return Example(self._tokens[index], int(self.prompts[index]), None, None)


class Batches:
    """The batches of one pass over some sequences of the data."""

    def __init__(
        self,
        sources: Sequence[Data | TokensOnly],
        chosen: Tensor,
        target: Source,
        layers: Sequence[int],
        drafted: Tensor,
        batch: int,
        width: int,
    ):
        """chosen [n] int64: indices over all sources, in the order of the pass; layers: whose inputs are the features,
        for sequences that come without; drafted [V_target] bool: the draft vocabulary; batch rows of width tokens.
        """
        self.sources, self.chosen, self.target, self.layers = sources, chosen, target, layers
        self.drafted, self.batch, self.width = drafted, batch, width
        self._first = torch.tensor([0, *(len(source) for source in sources)]).cumsum(0)
        lengths = torch.cat([source.lengths for source in sources])[chosen]
        self._ends = lengths.cumsum(0)

    def __len__(self) -> int:
        """Whole batches; what is left at the end waits for another order."""
        return int(self._ends[-1]) // (self.batch * self.width) if len(self._ends) else 0

    def __getitem__(self, index: int) -> TrainingBatch:
        start = index * self.batch * self.width
        stop = start + self.batch * self.width
        first = int(torch.searchsorted(self._ends, start, right=True))
        last = int(torch.searchsorted(self._ends, stop))
        examples = self._with_hidden([self._example(int(i)) for i in self.chosen[first : last + 1]])
        skipped = start - (int(self._ends[first - 1]) if first else 0)
        cut = slice(skipped, skipped + stop - start)
        parts = [
            torch.cat([example.tokens.long() for example in examples]),
            torch.cat([torch.full((len(example.tokens),), number) for number, example in enumerate(examples)]),
            torch.cat([self._labels(example) for example in examples]),
            torch.cat([example.hidden for example in examples if example.hidden is not None]),
            torch.cat([example.last for example in examples if example.last is not None]),
        ]
        device = self.target.model.device
        return TrainingBatch(*(part[cut].unflatten(0, (self.batch, self.width)).to(device) for part in parts))

    def _example(self, index: int) -> Example:
        source = int(torch.searchsorted(self._first, index, right=True)) - 1
        return self.sources[source][index - int(self._first[source])]

    def _with_hidden(self, examples: list[Example]) -> list[Example]:
        missing = [index for index, example in enumerate(examples) if example.hidden is None]
        sequences = [examples[index].tokens.tolist() for index in missing]
        for place, hidden, last in hidden_states(self.target, sequences, self.layers):
            example = examples[missing[place]]
            examples[missing[place]] = example._replace(hidden=hidden, last=last)
        return examples

    def _labels(self, example: Example) -> Tensor:
        """[T] bool: the next token was written by the target and can be drafted."""
        following = example.tokens[1:].long()
        written = torch.arange(1, len(example.tokens)) >= example.prompt
        return torch.nn.functional.pad(self.drafted[following] & written, (0, 1))

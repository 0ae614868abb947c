"""`specstep count`: bigram and trigram tables of a corpus, for the n-gram drafter.

Letters: V vocabulary, R contexts, K continuations kept per context.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..compile.drafters.ngram_file import save_tables, tokenizer_hash
from ..compile.source import load_tokenizer
from ..controls import MOST_LEARNED_ROWS
from ..errors import InputError
from ..graphs.drafters.ngram_tables import pack
from ..kernels.ngram.learned import WAYS, learn_text
from ..kernels.ngram.tables import EMPTY
from ..progress import OnProgress, silent
from ..runtime.learned import header, write_table
from .data.corpus import Text, read

MOST_IDS = 1 << 20  # vocabulary where no model says it: keys of three ids fit in int64, an entry in int32
CHUNK = 1 << 21  # tokens counted at a time
REPORT_EVERY = 2.0  # seconds
STEP = 8  # tokens that are learned at once, as of a step
# Discounts as pseudo-counts: the bigram reserve is dropped, the trigram reserve backs off to bigrams. Fitted by
# likelihood to held-out greedy answers, with tables of 1.5M tokens.
BIGRAM_DISCOUNT, TRIGRAM_DISCOUNT = 4.0, 8.0


def count(
    data: Sequence[str],
    output: str | Path,
    *,
    model: str | None = None,
    top: int = 8,
    min_count: int = 3,
    progress: OnProgress = silent,
) -> Path:
    """Count data directories and JSON-lines files (see `data/corpus.py`) into a file of tables -> its path. Raises
    InputError for data that cannot be counted and BuildError for a model or an output that cannot be used.

    model: whose tokenizer reads text, and for whom the tables are; None takes token ids only and notes no tokenizer.
    top: continuations kept per context; min_count: occurrences that make a pair of tokens a context.
    """
    for name, value, most in (("top", top, 64), ("min_count", min_count, 1 << 30)):
        if not 1 <= value <= most:
            raise InputError(f"{name}: expected 1 to {most}, got {value}")
    tokenizer, vocabulary, about = None, None, {}
    if model is not None:
        progress(f"loading the tokenizer of {model}")
        tokenizer, vocabulary = load_tokenizer(model)
        about = {"model": Path(model).name} | ({"tokenizer": tokenizer_hash(tokenizer)} if tokenizer else {})
    counts = Counts(vocabulary or MOST_IDS)
    for text in with_progress(read(data, tokenizer, vocabulary or MOST_IDS), counts, progress):
        counts.add(text)
    if not counts.tokens:
        raise InputError(f"data: expected sequences of at least two tokens, got none in {', '.join(data)}")
    progress(f"counted {counts.tokens:,} tokens of {counts.sequences:,} sequences")
    tensors = make_tables(counts, top, min_count)
    sizes = {kind: len(tensors[name]) for kind, name in (("bigrams", "bigram.tokens"), ("trigrams", "trigram.pairs"))}
    about |= {name: str(value) for name, value in (sizes | {"top": top, "min_count": min_count}).items()}
    about |= {"data": ", ".join(Path(file).name for file in data), "sequences": str(counts.sequences)}
    about |= {"tokens": str(counts.tokens)} | ({"vocab_size": str(vocabulary)} if vocabulary else {})
    size = save_tables(Path(output), tensors, about)
    progress(f"{output}: rows for {sizes['bigrams']:,} tokens and {sizes['trigrams']:,} pairs, {size / 1e6:.1f} MB")
    return Path(output)


def count_learned(
    data: Sequence[str],
    output: str | Path,
    *,
    model: str,
    learned_rows: int,
    progress: OnProgress = silent,
) -> Path:
    """Have a table of `kernels/ngram/learned.py` learn the same data, as if an engine had written it -> the path of the
    file for `load(learned=)`. Raises InputError, and EngineError where the file cannot be written."""
    if not 1 <= learned_rows <= MOST_LEARNED_ROWS:
        raise InputError(f"learned_rows: expected 1 to {MOST_LEARNED_ROWS}, as the engine has, got {learned_rows}")
    progress(f"loading the tokenizer of {model}")
    tokenizer, vocabulary = load_tokenizer(model)
    table, counts = torch.zeros(learned_rows + 1, WAYS, dtype=torch.int64), Tally()
    for text in with_progress(read(data, tokenizer, vocabulary), counts, progress):
        history = torch.tensor([text.tokens])
        for start in range(max(text.prompt, 1), len(text.tokens), STEP):
            moved = min(STEP, len(text.tokens) - start)
            learn_text(table, history, torch.tensor([start + moved - 1]), torch.tensor([moved]), STEP)
        counts.sequences, counts.tokens = counts.sequences + 1, counts.tokens + len(text.tokens) - text.prompt
    if not counts.tokens:
        raise InputError(f"data: expected sequences of at least two tokens, got none in {', '.join(data)}")
    path = Path(output)
    write_table(path, table.numpy(), header(vocabulary, tokenizer.get_vocab() if tokenizer else None))
    progress(
        f"{path}: {int((table > 0).sum()):,} of {table[:-1].numel():,} entries learned of {counts.tokens:,} tokens"
    )
    return path


@dataclass
class Tally:
    """How much was read so far."""

    sequences: int = 0
    tokens: int = 0


def with_progress(texts: Iterable[Text], counts: "Counts | Tally", progress: OnProgress) -> Iterable[Text]:
    """The same texts, with a line now and then about how far it is."""
    reported = time.monotonic()
    for text in texts:
        yield text
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            progress(f"counting: {counts.sequences:,} sequences, {counts.tokens:,} tokens")


class Counts:
    """How often each token follows each pair: sorted keys (previous + 1, last, next in base V + 1), and counts.
    previous is -1 at the start of a sequence."""

    def __init__(self, vocabulary: int):
        self.base = vocabulary + 1
        self.sequences = self.tokens = 0
        self._keys, self._counts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        self._new: list[Tensor] = []
        self._waiting = 0

    def add(self, text: Text) -> None:
        """Count the tokens after the prompt, or after the first where there is none."""
        first = max(text.prompt, 1)
        tokens = torch.tensor([-1, *text.tokens[max(first - 2, 0) :]] if first == 1 else text.tokens[first - 2 :])
        if len(text.tokens) > first:
            keys = ((tokens[:-2] + 1) * self.base + tokens[1:-1]) * self.base + tokens[2:]
            self._new.append(keys)
            self._waiting += len(keys)
            self.sequences, self.tokens = self.sequences + 1, self.tokens + len(keys)
        if self._waiting >= CHUNK:
            self._merge()

    def trigrams(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """previous [R] (-1 at a start), last [R], next [R], count [R] of all that was added, sorted."""
        self._merge()
        context, following = self._keys // self.base, self._keys % self.base
        return context // self.base - 1, context % self.base, following, self._counts

    def _merge(self) -> None:
        keys, counts = torch.cat(self._new or [self._keys[:0]]).unique(return_counts=True)
        self._keys, self._counts = add_up(torch.cat([self._keys, keys]), torch.cat([self._counts, counts]))
        self._new, self._waiting = [], 0


def add_up(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each key once, sorted, and the sum of its values."""
    unique, where = keys.unique(return_inverse=True)
    return unique, torch.zeros(len(unique), dtype=values.dtype).index_add_(0, where, values)


def make_tables(counts: Counts, top: int, min_count: int) -> dict[str, Tensor]:
    """Counts -> the tensors of `compile.ngram_file`: the `top` likeliest continuations of each token, and of each pair
    seen at least `min_count` times, there interpolated with those of its last token."""
    previous, last, following, count = counts.trigrams()
    base = counts.base
    pair, pair_count = add_up(last * base + following, count)
    token, total = add_up(pair // base, pair_count)
    probability = pair_count / (total[torch.searchsorted(token, pair // base)] + BIGRAM_DISCOUNT)
    rows = torch.searchsorted(token, pair // base)
    next_tokens, next_probability = best_of_rows(rows, pair % base, probability, len(token), top)

    frequent, context_count = add_up(previous * base + last, count)
    chosen = (context_count >= min_count) & (frequent >= 0)
    frequent, context_count = frequent[chosen], context_count[chosen]
    context = previous * base + last
    kept = torch.isin(context, frequent)
    row = torch.searchsorted(frequent, context[kept])
    backoff = probability[torch.searchsorted(pair, (last * base + following)[kept])]
    seen = (count[kept] + TRIGRAM_DISCOUNT * backoff) / (context_count[row] + TRIGRAM_DISCOUNT)
    # What only the bigrams know comes after the rest, with the share that the trigrams leave it.
    other = torch.searchsorted(token, frequent % base)
    share = TRIGRAM_DISCOUNT / (context_count + TRIGRAM_DISCOUNT)
    rest = next_tokens[other]
    keys = torch.cat([row * base + following[kept], (torch.arange(len(frequent))[:, None] * base + rest)[rest >= 0]])
    values = torch.cat([seen, (next_probability[other] * share[:, None])[rest >= 0]])
    keys, where = keys.unique(return_inverse=True)
    values = torch.zeros(len(keys)).scatter_reduce_(0, where, values, "amax")
    after, likely = best_of_rows(keys // base, keys % base, values, len(frequent), top)
    return {
        "bigram.tokens": token.int(),
        "bigram.entries": pack(next_tokens, next_probability),
        "trigram.pairs": torch.stack([frequent // base, frequent % base], 1).int(),
        "trigram.entries": pack(after, likely),
    }


def best_of_rows(row: Tensor, token: Tensor, probability: Tensor, rows: int, top: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row [rows, top], -1 where there are fewer, and their probabilities."""
    order = probability.argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    row = row[order]
    rank = torch.arange(len(row)) - torch.searchsorted(row, torch.arange(rows))[row]
    kept = rank < top
    tokens, values = torch.full((rows, top), EMPTY), torch.ones(rows, top)
    tokens[row[kept], rank[kept]] = token[order][kept]
    values[row[kept], rank[kept]] = probability[order][kept]
    return tokens, values

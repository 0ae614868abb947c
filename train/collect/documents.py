"""Prompts over documents: what users ask of a text that they bring.

A drafter that never saw a long prompt drafts badly behind one. Two prompts of three are an order, as "Summarize"; each
third is the document and a question about it that the model asks itself, as in `questions.py`.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import torch

from ...compile.source import Source
from ...errors import InputError
from ..data.corpus import lines
from .questions import user_prefix
from .sampling import sample

READ, LONGEST = 192, 48  # tokens of a document that a question is asked about, and of the question
TOGETHER = 16  # questions that are sampled at a time: another number gives other questions
OPENINGS = ("What", "What is", "Who", "When", "Where", "Which", "Why", "How", "How many", "How much", "How did")
ORDERS = (
    "Summarize: {}",
    "Summarize the following text.\n\n{}",
    "Summarize this article in three sentences:\n{}",
    "{}\n\nSummarize the text above.",
    "{}\n\nTl;dr",
    "List the key points of this text:\n\n{}",
    "What is the following text about?\n{}",
    "Write a headline for this article.\n\n{}",
    "Extract the names, dates and places from this text: {}",
    "Rewrite the following in simpler words:\n\n{}",
    "Correct the grammar of this text:\n{}",
    "{}\n\nGo on writing.",
)


def documents_of(file: str) -> Iterator[str]:
    """The "text" of each line of a file. Raises InputError naming file and line."""
    for place, entry in lines(file):
        text = entry.get("text")
        if not isinstance(text, str) or not text.strip():
            raise InputError(f'{place}: expected "text", a document, got {sorted(entry)}')
        yield text.strip()


def ask_about(
    source: Source, documents: Iterable[str], seed: int, tick: Callable[[int], None] = lambda tokens: None
) -> Iterator[str]:
    """A prompt over each document, in their order; the same seed gives the same ones. An order stands in for a question
    that the model does not end. Raises InputError for a model whose chat template does not say what comes before a
    user's turn."""
    choose, waiting, orders = random.Random(seed), iter(documents), 0
    while part := list(islice(waiting, 3 * TOGETHER)):
        asked = questions(source, part[2::3], choose, tick)
        for place, document in enumerate(part):
            question = asked[place // 3] if place % 3 == 2 else ""
            yield f"{document}\n{question}" if question else ORDERS[orders % len(ORDERS)].format(document)
            orders += not question


def questions(
    source: Source, documents: Sequence[str], choose: random.Random, tick: Callable[[int], None]
) -> list[str]:
    """What the model asks about the beginning of each document, all sampled together; "" where it does not end."""
    if not documents:
        return []
    (prefix, stop_ids), tokenizer = user_prefix(source), source.tokenizer
    openings = [choose.choice(OPENINGS) for _ in documents]
    read = tokenizer([prefix + text for text in documents], add_special_tokens=False)["input_ids"]
    begun = tokenizer([f"\n{opening}" for opening in openings], add_special_tokens=False)["input_ids"]
    starts, count = [text[:READ] + words for text, words in zip(read, begun, strict=True)], len(documents)
    generator = torch.Generator(source.model.device).manual_seed(choose.randrange(1 << 62))
    turns = sample(
        source, starts, [LONGEST] * count, temperatures=[1.0] * count, stop_ids=stop_ids, generator=generator, tick=tick
    )
    special = set(tokenizer.all_special_ids)
    return [
        (opening + tokenizer.decode(turn[:-1])).strip() if turn[-1] in stop_ids and not special & {*turn[:-1]} else ""
        for opening, turn in zip(openings, turns, strict=True)
    ]

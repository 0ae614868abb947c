"""`specstep collect`: what the target writes, as training data for its drafters.

Prompts come from a file, are made over documents (`documents.py`), or come from the model itself (`questions.py`);
answers come from the model (`answers.py`).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...compile.drafters.ngram_file import tokenizer_hash
from ...compile.source import Source, load_source
from ...errors import InputError
from ...progress import OnProgress, silent
from ..data.corpus import Text, encode, encode_lines, lines
from ..data.hidden_states import feature_layers, hidden_states, quick_dtype
from ..data.reader import Data, DataManifest, Example
from ..data.writer import DataWriter
from .answers import MOST_SAMPLED, Answers
from .documents import ask_about, documents_of
from .options import CollectOptions
from .progress import CollectProgress
from .questions import ask
from .sampling import rows_that_fit

ROUND = 128  # prompts that are answered together
QUESTION = 16  # tokens that a question of the model's own has at least
SHORT = 64  # tokens of a short sequence: no more prompts are drawn than may be needed


def collect(model: str, output: str | Path, options: CollectOptions, progress: OnProgress = silent) -> Path:
    """Collect what a model writes, and dialogues as they are, into a data directory (see `data/reader.py`) -> its path.
    Goes on where an earlier run ended. Raises InputError and BuildError."""
    output = Path(output)
    progress(f"loading {model}")
    source = load_source(model, options.dtype or quick_dtype(options.device), options.device)
    most = options.most_tokens
    with DataWriter(output, describe(source, options.hidden_states)) as writer:
        counted = CollectProgress(writer, progress)
        # Another seed for each run: no run repeats another.
        answers = Answers(source, output / "engine", options, options.seed + writer.sequences, counted)
        fresh = Fresh(writer, options.max_length)
        texts = fresh(texts_of(source, options, writer.sequences, counted))
        while most is None or writer.tokens < most:
            count = ROUND if most is None else min(ROUND, 1 + (most - writer.tokens) // SHORT)
            part = list(itertools.islice(texts, count))
            if not part:
                break
            for example in with_states(source, answers(part), writer.manifest.hidden_layers):
                writer.add(*example)
                counted.tick(0)
                if most is not None and writer.tokens >= most:
                    break
    progress(f"{output}: {writer.tokens:,} tokens in {writer.sequences:,} sequences")
    if fresh.left_out:
        progress(f"{fresh.left_out:,} prompts left out: there already, or too long")
    return output


def describe(source: Source, states: bool) -> DataManifest:
    """The manifest of a model's data, without shards, with or without hidden states."""
    manifest = DataManifest(
        model=Path(source.name).name,
        vocab_size=source.model.get_output_embeddings().weight.shape[0],
        tokenizer=tokenizer_hash(source.tokenizer) if source.tokenizer else None,
    )
    if not states:
        return manifest
    config = source.model.config.get_text_config()
    layers = feature_layers(config.num_hidden_layers)
    return dataclasses.replace(manifest, hidden_size=config.hidden_size, hidden_layers=layers)


def texts_of(source: Source, options: CollectOptions, done: int, progress: CollectProgress) -> Iterator[Text]:
    """Dialogues and prompts of the file, prompts over its documents, or the model's own questions without end; a prompt
    is a text that ends with it."""
    if options.prompts is not None:
        vocabulary = source.model.get_output_embeddings().weight.shape[0]
        entries = ((place, _with_response(entry)) for place, entry in lines(options.prompts))
        yield from encode_lines(entries, source.tokenizer, vocabulary)
        return
    if options.documents is not None:
        prompts = ask_about(source, documents_of(options.documents), options.seed, progress.tick)
    else:
        _check_room(source, options.max_length)
        rows = rows_that_fit(source, options.max_length, MOST_SAMPLED[source.model.device.type])
        prompts = ask(source, rows, options.seed + done, progress.tick)
    for prompt in prompts:
        yield from encode([{"prompt": prompt, "response": ""}], source.tokenizer)


def _check_room(source: Source, length: int) -> None:
    """Refuse sequences in which no question has room, all of which would be left out. Raises InputError."""
    if source.tokenizer is None:
        return  # `ask` says what is missing
    around = len(next(encode([{"prompt": "", "response": ""}], source.tokenizer)).tokens)
    if length < around + QUESTION:
        raise InputError(
            f"max_length: expected at least {around + QUESTION}, {around} of them for the chat template, got {length}"
        )


def _with_response(entry: dict[str, Any]) -> dict[str, Any]:
    """A line that only asks, with an empty response."""
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and "prompt" not in entry:
        entry = {"prompt": turns[0]}
    asks = "prompt" in entry and "response" not in entry and "token_ids" not in entry
    return entry | {"response": ""} if asks else entry


def with_states(source: Source, texts: Iterable[Text], layers: tuple[int, ...]) -> Iterator[Example]:
    """Texts as they come, or, where layers are named, all of them with their hidden states."""
    if not layers:
        yield from (Example(torch.tensor(tokens), prompt, None, None) for tokens, prompt in texts)
        return
    several = list(texts)
    states = {index: pair for index, *pair in hidden_states(source, [text.tokens for text in several], layers)}
    for index, (tokens, prompt) in enumerate(
        several
    ):  # as they came: those past the last token wanted are of any length
        yield Example(torch.tensor(tokens), prompt, *states.pop(index))


class Fresh:
    """Lets through the texts that the data does not hold yet: dialogues by all of their tokens, prompts by themselves.
    Counts those that it leaves out."""

    def __init__(self, writer: DataWriter, max_length: int):
        self.max_length, self.left_out = max_length, 0
        self._seen: set[int] = set()
        if writer.manifest.shards:
            for ids, prompt in Data(writer.folder).texts():
                tokens = tuple(ids.tolist())
                self._seen |= {hash(tokens), hash(tokens[:prompt])}

    def __call__(self, texts: Iterable[Text]) -> Iterator[Text]:
        for text in texts:
            cut = Text(text.tokens[: self.max_length], text.prompt)
            key = hash(tuple(cut.tokens))
            if key in self._seen or text.prompt >= self.max_length or not text.tokens:
                self.left_out += 1
            else:
                self._seen.add(key)
                yield cut

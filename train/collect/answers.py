"""Answers of the target to prompts: the greedy ones by our engine, those at a temperature by `sampling.py`."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...compile.build import build
from ...compile.drafters.ngram_file import tokenizer_hash
from ...compile.source import Source
from ...errors import InputError
from ...runtime.engine import Engine
from ...runtime.engine_file import MANIFEST
from ...runtime.load import load
from ..data.corpus import Text
from .options import CollectOptions
from .progress import CollectProgress
from .sampling import rows_that_fit, sample

MOST_ROWS = {"cpu": 8, "cuda": 64}  # of an engine that is built here
MOST_SAMPLED = {"cpu": 64, "cuda": 256}


class Answers:
    """Answers prompts. The engine is loaded, or built, when the first greedy answer is asked for."""

    def __init__(self, source: Source, folder: Path, options: CollectOptions, seed: int, progress: CollectProgress):
        """folder: where an engine is built, unless the options name one or it was built before."""
        self.source, self.options, self.progress = source, options, progress
        self._folder = Path(options.engine or folder)
        self._engine: Engine | None = None
        self._temperatures = itertools.cycle(options.answer_temperatures)
        self._generator = torch.Generator(source.model.device).manual_seed(seed)

    def __call__(self, texts: Sequence[Text]) -> Iterator[Text]:
        """Texts that have an answer as they are, the others with theirs, as they are ready."""
        waiting: list[tuple[float, list[int]]] = []
        for text in texts:
            if len(text.tokens) > text.prompt:
                yield text
            else:
                waiting.append((next(self._temperatures), text.tokens))
        yield from self._greedy([tokens for temperature, tokens in waiting if temperature == 0])
        rows = rows_that_fit(self.source, self.options.max_length, MOST_SAMPLED[self.source.model.device.type])
        warm = [(temperature, tokens) for temperature, tokens in waiting if temperature > 0]
        for first in range(0, len(warm), rows):
            yield from self._sampled(warm[first : first + rows])

    def _greedy(self, prompts: list[list[int]]) -> Iterator[Text]:
        if not prompts:
            return
        engine = self._engine = self._engine or self._load()
        requests = [engine.request(prompt, self._room(prompt)) for prompt in prompts]
        for request, tokens in engine.run(requests):
            self.progress.tick(len(tokens))
            if request.finish_reason:
                yield Text(request.prompt + request.tokens, len(request.prompt))

    def _sampled(self, batch: Sequence[tuple[float, list[int]]]) -> Iterator[Text]:
        temperatures, prompts = [temperature for temperature, _ in batch], [tokens for _, tokens in batch]
        answers = sample(
            self.source,
            prompts,
            [self._room(prompt) for prompt in prompts],
            temperatures=temperatures,
            stop_ids=self.source.stop_ids,
            generator=self._generator,
            tick=self.progress.tick,
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            yield Text(prompt + answer, len(prompt))

    def _room(self, prompt: list[int]) -> int:
        return min(self.options.max_new_tokens, self.options.max_length - len(prompt))

    def _load(self) -> Engine:
        if self.options.engine is None and not (self._folder / MANIFEST).is_file():
            progress, asked = self.progress.tell, self.options
            progress(f"building an engine for the greedy answers in {self._folder}; it can be deleted afterwards")
            rows = rows_that_fit(self.source, asked.max_length, MOST_ROWS[asked.device])
            build(
                self.source.name, self._folder, progress=progress, device=asked.device, dtype=asked.dtype or "bfloat16",
                max_batch=rows, max_seq_len=asked.max_length,
            )  # fmt: skip
        engine = load(self._folder)
        self._check(engine)
        return engine

    def _check(self, engine: Engine) -> None:
        """Refuse an engine that cannot answer in the source's place. Raises InputError."""
        vocabulary = self.source.model.get_output_embeddings().weight.shape[0]
        if engine.spec.vocab_size != vocabulary:
            raise InputError(
                f"engine: {self._folder}: vocab_size: expected the model's {vocabulary}, got {engine.spec.vocab_size}; "
                "give an engine of this model"
            )
        if engine.text and self.source.tokenizer:
            ours, theirs = tokenizer_hash(self.source.tokenizer), tokenizer_hash(engine.text.tokenizer)
            if ours != theirs:
                raise InputError(f"engine: {self._folder}: expected the tokenizer of {self.source.name}, got another")
        asked, has = self.options.dtype, engine.spec.config.get("dtype")
        if asked is not None and asked != has:
            raise InputError(
                f"engine: {self._folder}: dtype: expected {asked}, as asked for, got {has}; have another one, or leave "
                "--dtype out"
            )
        if engine.spec.max_seq_len < self.options.max_length:
            raise InputError(
                f"engine: {self._folder}: max_seq_len: expected at least the {self.options.max_length} tokens of a "
                f"sequence, got {engine.spec.max_seq_len}; build it with a larger one or give a smaller --max-length"
            )

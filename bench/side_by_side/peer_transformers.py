"""Transformers' own `generate`, plain and with prompt lookup."""

import time
from importlib.metadata import version as installed_version
from pathlib import Path

import torch
from specstep.compile.source import load_source
from specstep.progress import OnProgress

from .engines import Answer, Contender, Settings

INSTALL = "make install"


def version() -> str:
    """The package's."""
    return installed_version("transformers")


def prepare(contender: Contender, settings: Settings, progress: OnProgress) -> Path:
    """It loads the model itself, by its name."""
    return Path(settings.model)


class Clock:
    """Stands where a streamer may stand: when the tokens of each pass came. The first it is handed is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Take new tokens."""
        self.times.append(time.perf_counter())
        self.counts.append(tokens.numel())

    def end(self) -> None:
        """Nothing more comes."""


class Runner:
    """The model in bfloat16, loaded as `specstep build` loads it."""

    def __init__(self, contender: Contender, path: Path, settings: Settings):
        torch.set_num_threads(settings.threads)
        source = load_source(settings.model, "bfloat16", "cpu")
        self.model, self.stop_ids = source.model, list(source.stop_ids)
        self.lookup = {}
        if contender.options:
            self.lookup = {
                "prompt_lookup_num_tokens": contender.options["tokens"],
                "max_matching_ngram_size": contender.options["ngram"],
            }

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """One prompt; its pass ends when the first token is there."""
        ids, clock = torch.tensor([prompt]), Clock()
        with torch.inference_mode():
            whole = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=self.stop_ids[0],
                streamer=clock,
                **self.lookup,
            )
        tokens = whole[0, len(prompt) :].tolist()
        start, first, last = clock.times[0], clock.times[1], clock.times[-1]
        return Answer(tokens, first - start, last - first, len(tokens) - clock.counts[1], len(clock.times) - 2)

    def close(self) -> None:
        """Nothing to give back but the process."""

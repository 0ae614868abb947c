"""What `make bench` compares: a table of engines, and what runs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from specstep.progress import OnProgress


class Skip(Exception):
    """An engine that cannot run here: one line that says why and what to do."""


@dataclass(frozen=True)
class Contender:
    """One row of the table. weights: their precision. drafts: how it speculates, "none" for plain decoding. options:
    what the runner of its family takes."""

    family: str
    weights: str
    drafts: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.family, self.weights, *([self.drafts] if self.drafts != "none" else [])])


@dataclass(frozen=True)
class Settings:
    """What all engines of a run share. model: as `specstep build` takes it. slots: most tokens of a row, prompt
    included. rows: most rows at once. stop_ids: tokens that end an answer. folder: where engines and converted files
    are kept. lessons: prompts whose answers, of at most `new_tokens`, LEARNED engines have written before."""

    model: str
    threads: int
    slots: int
    rows: int
    stop_ids: tuple[int, ...]
    folder: Path
    lessons: tuple[list[int], ...] = ()
    new_tokens: int = 128


class Answer(NamedTuple):
    """What an engine wrote for a prompt. prompt_s: seconds until the prompt was read. decode_s: seconds after that, in
    which `decoded` of the tokens were written. steps: passes of the model in that time, None where nobody counts."""

    tokens: list[int]
    prompt_s: float
    decode_s: float
    decoded: int
    steps: int | None = None


class Runner(Protocol):
    """A loaded engine, in a process of its own."""

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """Write greedily, at most `new_tokens`, up to an end-of-sequence token."""

    def close(self) -> None:
        """Give everything back."""


class BatchRunner(Runner, Protocol):
    """One that is measured with several rows, too: see `batches.FAMILIES`."""

    def answer_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """`answer` for as many prompts as there are rows, at once."""


class Family(Protocol):
    """A module that runs the engines of one project."""

    INSTALL: str  # a line that installs what it needs

    def version(self) -> str:
        """Raises Skip where it is not installed."""

    def prepare(self, contender: Contender, settings: Settings, progress: OnProgress) -> Path:
        """What the runner loads: an engine directory or a file, made unless it is there. Raises Skip."""

    def Runner(self, contender: Contender, path: Path, settings: Settings) -> Runner: ...


OUR_WEIGHTS = {"bf16": "bfloat16", "int8": "int8", "int4": "int4", "auto": "auto"}  # auto: as the file has them
TRANSFORMERS_LOOKUP = {"tokens": 10, "ngram": 2}  # as its documentation sets it
OPENVINO_LOOKUP = {"tokens": 5, "ngram": 3}  # as its samples set it
# Its own default, n-grams of 12 and 48 drafted tokens, is for texts that repeat whole passages: here it hardly drafts.
LLAMA_CPP_LOOKUP = {"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 8}

AS_IT_IS = "the file"  # weights that nobody converts
LEARNED = "learned"  # drafts that know what the engine wrote for other prompts

CONTENDERS = [
    *(
        Contender("specstep", name, drafter, {"drafter": drafter, "weights": weights})
        for name, weights in OUR_WEIGHTS.items()
        for drafter in ("none", "default")
    ),
    Contender("specstep", "auto", LEARNED, {"drafter": "default", "weights": "auto"}),
    Contender("transformers", "bf16", "none"),
    Contender("transformers", "bf16", "prompt lookup", TRANSFORMERS_LOOKUP),
    *(
        Contender("llama.cpp", weights, mode, options)
        for weights in ("bf16", "q8_0", "q4_0", AS_IT_IS)
        for mode, options in (("none", {}), ("ngram-simple", LLAMA_CPP_LOOKUP))
    ),
    *(
        Contender("OpenVINO GenAI", weights, drafts, options)
        for weights in ("q8_0", "q4_0")
        for drafts, options in (("none", {}), ("prompt lookup", OPENVINO_LOOKUP))
    ),
]

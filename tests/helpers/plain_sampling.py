"""What a request asks for, twice: as the engine's controls, and as transformers' own processors in their own order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf


@dataclass(frozen=True)
class Asked:
    """Sampling parameters by the names of transformers and vLLM; the defaults ask for nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    suppressed: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    stop_ids: Sequence[int] = ()
    seed: int = 0

    def controls(self, prompt_length: int) -> dict[str, Any]:
        """As `Session.admit` takes them, without stop_ids, which it takes by themselves."""
        top_p = self.top_p if self.top_p < 1 else 0.0
        repetition = self.repetition_penalty if self.repetition_penalty != 1 else 0.0
        biases = dict(self.bias) | dict.fromkeys(self.banned_tokens, -torch.inf)
        words = [word for word in self.bad_words if len(word) > 1]
        return {
            "sampling": [
                *(self.temperature, self.top_k, top_p, self.min_p),
                *(repetition, self.presence_penalty, self.frequency_penalty),
            ],
            "seeds": self.seed,
            "min_lengths": prompt_length + self.min_new_tokens,
            "bias_ids": list(biases),
            "bias": list(biases.values()),
            "banned_words": [[-1] * (8 - len(word)) + list(word) for word in words],
        }

    @property
    def banned_tokens(self) -> set[int]:
        return {*self.suppressed, *(word[0] for word in self.bad_words if len(word) == 1)}

    def processors(self, prompt_length: int) -> list[Any]:
        """The processors that transformers' `generate` makes of these, in the order in which it calls them."""
        given: list[Any] = []
        if self.bias:
            given.append(hf.SequenceBiasLogitsProcessor([[[token], value] for token, value in self.bias.items()]))
        if self.repetition_penalty != 1:
            given.append(hf.RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        given.append(OutputPenalties(self.presence_penalty, self.frequency_penalty, prompt_length))
        if self.bad_words:
            given.append(hf.NoBadWordsLogitsProcessor([list(word) for word in self.bad_words]))
        if self.min_new_tokens and self.stop_ids:
            stops = list(self.stop_ids)
            given.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, self.min_new_tokens, stops))
        if self.suppressed:
            given.append(hf.SuppressTokensLogitsProcessor(list(self.suppressed)))
        return given + self._warpers()

    def _warpers(self) -> list[Any]:
        given: list[Any] = []
        if self.temperature > 0:
            given.append(hf.TemperatureLogitsWarper(float(self.temperature)))
            given += [hf.TopKLogitsWarper(self.top_k)] if self.top_k else []
            given += [hf.TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
            given += [hf.MinPLogitsWarper(self.min_p)] if self.min_p else []
        return given

    def scores(self, prompt_length: int, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Logits [V] after these tokens, prompt and output, as transformers processes them."""
        scores, ids = logits[None], torch.tensor([list(tokens)])
        for processor in self.processors(prompt_length):
            scores = processor(ids, scores)
        return scores[0]


class OutputPenalties:
    """vLLM's presence and frequency penalties, which transformers does not have: of the output alone."""

    def __init__(self, presence: float, frequency: float, prompt_length: int):
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self.prompt_length :].tolist():
            counts[0, token] += 1
        return scores - self.frequency * counts - self.presence * (counts > 0)


def written(state: dict[str, Tensor], row: int, controls: Mapping[str, Any]) -> None:
    """Write controls to a row of state tensors, as a session does."""
    for name, values in controls.items():
        given = torch.as_tensor(values, dtype=state[name].dtype)
        if given.dim() == 0:
            state[name][row] = given
        elif len(given):
            state[name][row, : len(given)] = given

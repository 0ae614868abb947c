"""What a request says that its answer will probably repeat: checked, told to a row, and compared with the answer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InputError
from ..engine_file import EngineSpec
from ..text.tokenizer import EngineTokenizer
from .prompt import Prediction, one_each, token_ids

LONGEST = 4  # tokens of a match; more tell no more


def predictions(given: Any, count: int, single: bool) -> list[Any]:
    """The prediction for each of so many prompts: one for all of them, or a list of them. Raises InputError."""
    given = given.tolist() if hasattr(given, "tolist") else given
    ids = isinstance(given, Sequence) and len(given) > 0 and all(hasattr(token, "__index__") for token in given)
    return [given] * count if single or ids else one_each(given, count, "prediction")


def prediction_controls(
    spec: EngineSpec, text: EngineTokenizer | None, prediction: Prediction, name: str
) -> dict[str, Any]:
    """What tells a row of a prediction; nothing for none. Raises InputError."""
    if isinstance(prediction, str):
        if text is None:
            raise InputError(f"{name}: prediction: expected an engine with a tokenizer, got none; give token ids")
        tokens = text.encode_part(prediction) if prediction else []
    elif prediction is None:
        tokens = []
    elif isinstance(prediction, Sequence) or hasattr(prediction, "tolist"):
        tokens = token_ids(prediction, spec.vocab_size, f"{name}: prediction")
    else:
        raise InputError(f"{name}: prediction: expected text or token ids, got {type(prediction).__name__}")
    if len(tokens) > spec.max_seq_len:
        raise InputError(
            f"{name}: prediction: expected at most {spec.max_seq_len} tokens (max_seq_len), got {len(tokens)}; give "
            "the part that the answer will repeat, or build with a larger --max-seq-len"
        )
    return {"prediction": tokens, "prediction_lengths": len(tokens)} if tokens else {}


class FollowedPrediction:
    """Which tokens of a prediction the answer has so far. The answer is followed as the n-gram drafter does it: see
    `kernels.ngram.reference.follow_prediction`."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens = np.array([-1] * LONGEST + list(tokens))  # nothing ahead of the first one
        self._found = np.zeros(len(tokens), bool)
        self._place, self._context = 0, list[int]()

    def push(self, tokens: Sequence[int]) -> None:
        """Take in the answer's next tokens."""
        for token in tokens:
            if self._place < len(self._found) and self._tokens[LONGEST + self._place] == token:
                self._found[self._place] = True
            self._context = [*self._context, token][-LONGEST:]
            self._place = self._next(self._place + 1)

    def _next(self, expected: int) -> int:
        """Behind the longest match, of equals the nearest to the expected place, then the later."""
        places, matches = np.arange(len(self._found)), 0
        for back, token in enumerate(reversed(self._context), 1):
            matched = places[self._tokens[LONGEST - back + places] == token]
            if not len(matched):
                break
            places, matches = matched, back
        if not matches:
            return expected
        distance = np.abs(places - expected)
        return int(places[len(places) - 1 - distance[::-1].argmin()])

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that the answer has."""
        return int(self._found.sum())

    @property
    def rejected(self) -> int:
        """Those that it has not."""
        return len(self._found) - self.accepted

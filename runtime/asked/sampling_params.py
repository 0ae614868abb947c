"""What a user may ask of how tokens are chosen and where the text ends, checked when it is made."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal

from ...controls import TOP_LOGPROBS
from ...errors import InputError
from .structured import checked_structured

MOST_STOPS, MOST_CHOICES = 16, 128
LONGEST_ID = 18  # digits; Python reads no integer of some thousands
SEEDS = 2**63  # a seed counts as the remainder of its division by SEEDS, which is not negative
MOST_SEED = 2**128

ELSEWHERE = {  # names of vLLM, OpenAI and transformers -> what does it here
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_length"), "the argument max_new_tokens"
    ),
    **dict.fromkeys(("min_tokens", "min_length"), "min_new_tokens"),
    **dict.fromkeys(("stop_token_ids", "eos_token_id"), "the argument stop_ids"),
    **dict.fromkeys(("best_of", "num_return_sequences"), "n"),
    **dict.fromkeys(("structured_outputs", "guided_decoding", "response_format"), "structured"),
    "allowed_token_ids": "the argument allowed_tokens",
    **dict.fromkeys(("begin_suppress_tokens", "sequence_bias"), "logit_bias or suppress_tokens"),
    "do_sample": "temperature, 0 for greedy",
    "ignore_eos": "the argument ignore_eos",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen, and where its text ends. What is not set asks for nothing: greedy.

    The names are those of vLLM and transformers; docs/sampling.md has a table of them. Raises InputError for a value
    out of its range.
    """

    temperature: float = 0.0  # 0, or 0.01 to 100
    top_k: int = 0  # 0 and -1 keep all
    top_p: float = 1.0  # keep the likeliest tokens that have this probability together; above 0, to 1
    min_p: float = 0.0  # least share of the likeliest token's probability, 0 to 1
    repetition_penalty: float = 1.0  # of tokens in prompt or output, 0.01 to 100; 1: off
    presence_penalty: float = 0.0  # subtracted once for a token of the output, -2 to 2
    frequency_penalty: float = 0.0  # subtracted for each time it is there, -2 to 2
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # token id, or its digits -> -100 to 100
    suppress_tokens: Sequence[int] = ()  # never written
    bad_words: Sequence[str] = ()  # texts that are never written
    bad_words_ids: Sequence[Sequence[int]] = ()  # sequences of tokens that are never written
    min_new_tokens: int = 0  # before so many, no stop id is chosen, and no stop string counts
    stop: str | Sequence[str] = ()  # texts that end the output and are left out of it
    seed: int | None = None  # None and -1 draw one
    logprobs: int | None = None  # so many of the likeliest tokens are told in the place of each
    n: int = 1  # outputs; the i-th has the seed `seed` + i
    # What the whole output must be: {"json": SCHEMA}, {"json_object": True}, {"regex": TEXT}, {"choice": TEXTS} or
    # {"grammar": GBNF or Lark}; see `structured.checked_structured`.
    structured: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def of(cls, given: "SamplingParams | Mapping[str, Any]") -> "SamplingParams":
        """Parameters as they are, or from a mapping of their names, where None is a value not given. Raises
        InputError."""
        if isinstance(given, SamplingParams):
            return given
        if not isinstance(given, Mapping):
            raise InputError(
                f'sampling: expected SamplingParams, a mapping of its fields, or "model", got {given!r:.60}'
            )
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                hint = f"; here that is {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                raise InputError(f"sampling: expected names out of {', '.join(known)}, got {name!r:.60}{hint}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that ask for something."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(GREEDY, name)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changed.items()) or "greedy"


SamplingArgument = SamplingParams | Mapping[str, Any] | Literal["model"]  # what `sampling` may be, for one prompt
FieldReader = Callable[[str, Any], Any]  # a field's name and value -> the value as it is kept; raises InputError


def _refuse(name: str, expected: str, value: Any) -> InputError:
    return InputError(f"{name}: expected {expected}, got {value!r:.60}")


def _number(low: float, high: float, expected: str = "", above: bool = False, zero: bool = False) -> FieldReader:
    """A number from low to high, without `low` itself where `above`, or 0 where `zero`. NaN is in no range."""
    expected = expected or (f"a number above {low} and up to {high}" if above else f"a number from {low} to {high}")

    def check(name: str, value: Any) -> float:
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (low <= value <= high or (zero and value == 0)) or (above and value == low):
            raise _refuse(name, expected, value)
        return float(value) or 0.0  # not -0.0

    return check


def _integer(low: int, high: int | None = None, expected: str = "") -> FieldReader:
    expected = expected or (f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}")

    def check(name: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise _refuse(name, expected, value) from None
        if isinstance(value, bool) or number < low or (high is not None and number > high):
            raise _refuse(name, expected, value)
        return number

    return check


def _or_none(check: FieldReader) -> FieldReader:
    return lambda name, value: None if value is None else check(name, value)


def _list_of(check: FieldReader, expected: str) -> FieldReader:
    """A sequence or an array, kept as a tuple."""

    def each(name: str, values: Any) -> tuple[Any, ...]:
        given = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise _refuse(name, f"a list of {expected}", values)
        return tuple(check(f"{name}[{index}]", value) for index, value in enumerate(given))

    return each


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _refuse(name, "a text that is not empty", value)
    return value


def _word(name: str, value: Any) -> tuple[int, ...]:
    tokens = _TOKENS(name, value)
    if not tokens:
        raise _refuse(name, "at least one token id", value)
    return tuple(tokens)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = _list_of(_text, "texts")(name, [value] if isinstance(value, str) else value)
    if len(texts) > MOST_STOPS:
        raise _refuse(name, f"at most {MOST_STOPS} texts", len(texts))
    return tuple(dict.fromkeys(texts))


def _biases(name: str, value: Any) -> dict[int, float]:
    """Ids as integers: in JSON, the names of an object are texts."""
    if not isinstance(value, Mapping):
        raise _refuse(name, "a mapping of token ids to numbers", value)
    biases = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= LONGEST_ID
        token = _ID(f"{name}: token id", int(key) if digits else key)
        if token in biases:
            raise _refuse(name, "each token id once", key)
        biases[token] = _number(-100, 100)(f"{name}[{token}]", bias)
    return biases


_ID = _integer(0)
_TOKENS = _list_of(_ID, "token ids")
_CHECKS: dict[str, FieldReader] = {
    "temperature": _number(0.01, 100, "0 or a number from 0.01 to 100", zero=True),
    "top_k": _integer(-1, expected="-1 or 0 for all tokens, or an integer of at least 1"),
    "top_p": _number(0, 1, above=True),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0.01, 100),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _or_none(_biases),
    "suppress_tokens": _TOKENS,
    "bad_words": _list_of(_text, "texts"),
    "bad_words_ids": _list_of(_word, "lists of token ids"),
    "min_new_tokens": _integer(0),
    "stop": _stops,
    "seed": _or_none(_integer(-MOST_SEED, MOST_SEED, "an integer of at most 128 bits")),
    "logprobs": _or_none(_integer(0, TOP_LOGPROBS)),
    "n": _integer(1, MOST_CHOICES),
    "structured": _or_none(checked_structured),
}
GREEDY = SamplingParams()

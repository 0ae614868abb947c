"""From sampling parameters to the state tensors of a row: what `session.Session.admit` takes as controls."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ...controls import Sampling
from ...errors import InputError
from ..engine_file import EngineSpec
from ..text.tokenizer import EngineTokenizer
from .prompt import token_ids
from .sampling_params import SEEDS, SamplingParams

BANNED = float("-inf")
LEAST_TOP_P = 1e-30  # less keeps the likeliest token alone as well, and may be 0 in float32, which is off


def controls(
    params: SamplingParams, spec: EngineSpec, prompt: int, tokenizer: EngineTokenizer | None
) -> dict[str, Any]:
    """The controls of a request, without its seed; nothing for what it does not ask for.

    Args:
        prompt: how many tokens the prompt has.
        tokenizer: for `bad_words`.

    Raises:
        InputError: a token id that the model lacks, or more of something than a row of the engine holds.
    """
    asked: dict[str, Any] = {}
    columns = _columns(params, spec.vocab_size)
    if any(columns):
        asked["sampling"] = list(columns)
    if params.min_new_tokens:
        asked["min_lengths"] = prompt + params.min_new_tokens
    if params.logprobs is not None:
        asked["logprobs"] = params.logprobs
    shapes = {tensor.name: tensor.shape for tensor in spec.state}
    words = _banned_words(params, spec.vocab_size, tokenizer)
    biases = _biases(params, spec.vocab_size, [word[0] for word in words if len(word) == 1])
    sequences = [word for word in words if len(word) > 1]
    if biases:
        _check_count(biases, shapes["bias_ids"][1], "logit_bias, suppress_tokens, bad_words: expected", "tokens")
        asked |= {"bias_ids": list(biases), "bias": list(biases.values())}
    if sequences:
        most, longest = shapes["banned_words"][1:]
        _check_count(sequences, most, "bad_words: expected", "sequences of tokens")
        for word in sequences:
            _check_count(word, longest, "bad_words: expected words of", "tokens")
        asked["banned_words"] = [[-1] * (longest - len(word)) + word for word in sequences]
    return asked


def seeds(params: SamplingParams) -> list[dict[str, int]]:
    """The control `seeds` of each choice: that of the i-th is the seed + i, without its sign, which the noise does not
    know. Greedy choices have none. -1 draws a seed, as None does: clients of vLLM and llama.cpp send it."""
    if not params.temperature:
        return [{}] * params.n
    first = secrets.randbits(48) if params.seed in (None, -1) else params.seed  # any JSON reader has 48 bits
    return [{"seeds": (first + choice) % SEEDS} for choice in range(params.n)]


def _columns(params: SamplingParams, vocabulary: int) -> Sampling:
    """0 for what is off. A greedy row takes no filter: each of them keeps the likeliest token."""
    sampled = params.temperature > 0
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k if sampled and 0 < params.top_k < vocabulary else 0,
        top_p=max(params.top_p, LEAST_TOP_P) if sampled and params.top_p < 1 else 0,
        min_p=params.min_p if sampled else 0,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )


def _banned_words(params: SamplingParams, vocabulary: int, tokenizer: EngineTokenizer | None) -> list[list[int]]:
    """Each banned sequence of tokens once. A text is banned as it stands at the start of a text and behind a space."""
    words = [token_ids(word, vocabulary, f"bad_words_ids[{at}]") for at, word in enumerate(params.bad_words_ids)]
    for text in params.bad_words:
        if tokenizer is None:
            raise InputError("bad_words: expected an engine with a tokenizer, got one without; give bad_words_ids")
        bare = text.lstrip(" ") or text
        alone, behind = (tokenizer.encode_part(prefix + bare) for prefix in ("", " "))
        words += [alone] if behind[-len(alone) :] == alone else [alone, behind]  # what ends in a banned one is banned
    return [list(word) for word in dict.fromkeys(map(tuple, words))]


def _biases(params: SamplingParams, vocabulary: int, banned: Sequence[int]) -> Mapping[int, float]:
    """Token -> what is added to its logit: each token once, bans as -inf."""
    given = params.logit_bias or {}
    biases = dict(zip(token_ids(list(given), vocabulary, "logit_bias"), given.values(), strict=True))
    for token in [*token_ids(params.suppress_tokens, vocabulary, "suppress_tokens"), *banned]:
        biases[token] = BANNED
    return {token: bias for token, bias in biases.items() if bias}


def _check_count(values: Any, most: int, expected: str, unit: str) -> None:
    if len(values) > most:
        raise InputError(f"{expected} at most {most} {unit}, got {len(values)}")

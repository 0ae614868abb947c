"""From a prompt and what is asked of it to requests, checked against an engine's limits."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from ..engine_file import EngineSpec
from ..text.channels import Channels
from ..text.reasoning import Reasoning, reasoning_of
from ..text.stop_text import StopText
from ..text.tokenizer import EngineTokenizer
from .allowed_tokens import AllowedTokens, checking
from .grammar import Grammar
from .prediction import prediction_controls
from .prompt import Prompt, at_least_one, encode, is_conversation, token_ids
from .request import Request
from .sampling_controls import controls, seeds
from .sampling_params import GREEDY, SamplingParams


def make_requests(
    spec: EngineSpec,
    text: EngineTokenizer | None,
    recommended: SamplingParams | None,
    prompt: Prompt,
    max_new_tokens: Any,
    *,
    name: str,
    sampling: Any = None,
    chat: bool = False,
    ignore_eos: bool = False,
    stop_ids: Sequence[int] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    allowed_tokens: AllowedTokens | None = None,
    forced_acceptance: bool = False,
    prefix_scope: str = "",
    learning: bool = True,
    prediction: Any = None,
    parse_special: bool | None = None,
) -> list[Request]:
    """A request for each of the n choices of a prompt. Options as in `RequestOptions`. Raises InputError."""
    _refuse_forced(spec, forced_acceptance)
    if isinstance(prompt, str) or is_conversation(prompt):
        tokens = encode(require_tokenizer(text), prompt, chat, chat_template_kwargs, name, parse_special)
    else:
        tokens = token_ids(prompt, spec.vocab_size, f"{name}: token_ids")
    if not isinstance(prefix_scope, str):
        raise InputError(f"prefix_scope: expected a text, got {type(prefix_scope).__name__}")
    params, most = _params(sampling, recommended), _room(spec, tokens, max_new_tokens, name)
    _check_counts(params, most, name)
    answers = text is not None and (chat or (not isinstance(prompt, str) and is_conversation(prompt)))
    reasoning = reasoning_of(text, tokens) if text is not None and answers and params.structured else None
    grammar = _grammar(spec, text, params, allowed_tokens, reasoning)
    given = checking(allowed_tokens, spec.vocab_size) if allowed_tokens else None
    asked = _controls(spec, text, params, len(tokens), given, grammar)
    asked |= {} if learning else {"learning": 0}
    asked |= prediction_controls(spec, text, prediction, name)
    stops = _stop_ids(spec, ignore_eos and grammar is None, stop_ids)

    requests = []
    for seed in seeds(params):
        masks = grammar.masks(stops, params.min_new_tokens, ignore_eos, learning) if grammar else None
        request = Request(tokens, len(tokens) + most, stops, asked | seed, _stop_text(params, text))
        request.allowed_tokens, request.fit_tree = masks or given, masks.fit if masks else None
        request.prefix_scope = prefix_scope
        requests.append(request)
    return requests


def _refuse_forced(spec: EngineSpec, forced_acceptance: bool) -> None:
    """Raises InputError for an engine that measures speed alone, unless that was asked for."""
    forced = spec.config.get("forced_acceptance")
    if forced is not None and not forced_acceptance:
        raise InputError(
            f"engine: expected one that gives its model's text, got one built with --forced-acceptance {forced}, which "
            "accepts drafts right or wrong; to measure its speed give forced_acceptance"
        )


def _check_counts(params: SamplingParams, most: int, name: str) -> None:
    """most: new tokens that fit. Raises InputError."""
    if params.min_new_tokens > most:
        raise InputError(f"{name}: min_new_tokens: expected at most {most}, which fit, got {params.min_new_tokens}")
    if params.n > 1 and not params.temperature:
        raise InputError(f"{name}: n: expected 1 at temperature 0, where all choices are the same, got {params.n}")


def _controls(
    spec: EngineSpec,
    text: EngineTokenizer | None,
    params: SamplingParams,
    prompt_tokens: int,
    given: AllowedTokens | None,
    grammar: Grammar | None,
) -> dict[str, Any]:
    """What the sampling of a row is told -> a value for each control. given: what the caller allows at each token."""
    banned_ends = params if grammar is None else dataclasses.replace(params, min_new_tokens=0)  # its masks see to that
    asked = controls(banned_ends, spec, prompt_tokens, text)
    return asked | {"masked": 1} if given or grammar else asked


def _grammar(
    spec: EngineSpec,
    text: EngineTokenizer | None,
    params: SamplingParams,
    allowed_tokens: AllowedTokens | None,
    reasoning: Reasoning | Channels | None,
) -> Grammar | None:
    """What an output must be, if anything. Raises InputError, also for bans, which might leave nothing of it."""
    if params.structured is None:
        return None
    if allowed_tokens is not None:
        raise InputError("structured: expected none beside allowed_tokens, got both")
    for name in ("suppress_tokens", "bad_words", "bad_words_ids"):
        if getattr(params, name):
            raise InputError(f"{name}: expected none beside structured, whose grammar may need them; give logit_bias")
    return Grammar(require_tokenizer(text), spec.vocab_size, spec.stop_ids, params.structured, reasoning)


def require_tokenizer(text: EngineTokenizer | None) -> EngineTokenizer:
    """Raises InputError for an engine that was built without one."""
    if text is None:
        raise InputError("engine: expected one with a tokenizer for text and messages, got one without; give token ids")
    return text


def _params(sampling: Any, recommended: SamplingParams | None) -> SamplingParams:
    """What was asked for; greedy where nothing was. Raises InputError."""
    if sampling is None or (isinstance(sampling, str) and sampling == "model"):
        return (recommended or GREEDY) if sampling else GREEDY
    return SamplingParams.of(sampling)


def _room(spec: EngineSpec, tokens: Sequence[int], max_new_tokens: Any, name: str) -> int:
    """Most new tokens of a prompt. Raises InputError for one that the engine cannot take."""
    longest = spec.max_seq_len - 1
    if not tokens:
        raise InputError(f"{name}: expected at least one token, got an empty prompt")
    if len(tokens) > longest:
        raise InputError(
            f"{name}: expected at most {longest} tokens (max_seq_len {spec.max_seq_len}), got {len(tokens)}; "
            "shorten it or build with a larger --max-seq-len"
        )
    return min(spec.max_seq_len - len(tokens), at_least_one(max_new_tokens, spec.max_seq_len, "max_new_tokens"))


def _stop_ids(spec: EngineSpec, ignore_eos: bool, stop_ids: Sequence[int]) -> list[int]:
    """The model's end-of-sequence tokens and those that were given, each once. Raises InputError."""
    given = token_ids(stop_ids, spec.vocab_size, "stop_ids")
    stops = list(dict.fromkeys([*(() if ignore_eos else spec.stop_ids), *given]))
    most = next(tensor.shape[1] for tensor in spec.state if tensor.name == "stop_ids")
    if len(stops) > most:
        raise InputError(f"stop_ids: expected at most {most} stop tokens, got {len(stops)}")
    return stops


def _stop_text(params: SamplingParams, text: EngineTokenizer | None) -> StopText | None:
    """What looks for stop strings, where there are any. Raises InputError for an engine without a tokenizer."""
    if not params.stop:
        return None
    if text is None:
        raise InputError("stop: expected an engine with a tokenizer, got one without; give stop_ids")
    return StopText(text, tuple(params.stop), params.min_new_tokens)

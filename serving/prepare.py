"""From the body of a call to the engine's requests. Runs in a thread: a long prompt takes a while."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..runtime.asked.prompt import RequestOptions
from ..runtime.asked.request import Request
from ..runtime.asked.sampling_params import SamplingParams
from ..runtime.text.messages import Message
from .errors import ApiError, too_long
from .fields import Asked, ChatRequest, CompletionRequest
from .served import Served

SAME = (  # fields that the engine knows under the same name
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "bad_words", "stop", "seed", "n",
)  # fmt: skip
DEFAULT_COMPLETION = 16  # tokens, as OpenAI's API has it


@dataclass(frozen=True)
class Prepared:
    """A call, ready to run: a request for each choice, prompt by prompt; the first of each prompt; and the text ahead
    of each choice, where it is echoed."""

    requests: list[Request]
    firsts: list[Request]
    echoed: list[str] = field(default_factory=list)


def choices(body: Asked) -> int:
    """How many requests a call makes. Raises ApiError for fields that do not go together."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options: expected stream true beside it", param="stream_options")
    return (body.n or 1) * (len(_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1)


def prepare_chat(served: Served, body: ChatRequest, scope: str) -> Prepared:
    """Raises ApiError and InputError for what the engine cannot take."""
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens: expected max_completion_tokens alone, got both", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs true beside it", param="top_logprobs")
    tokens = chat_tokens(served, [message.plain() for message in body.messages], body.chat_template_kwargs)
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    likely = body.prediction.text if body.prediction else None
    if likely and len(likely) > served.most_characters:
        raise too_long("prediction", served.most_tokens, f"{len(likely)} characters")
    requests = _requests(served, body, tokens, most, logprobs, scope, likely)
    return Prepared(requests, requests[:1])


def prepare_completion(served: Served, body: CompletionRequest, scope: str) -> Prepared:
    """Raises ApiError and InputError for what the engine cannot take."""
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "logprobs: expected none beside echo: those of prompts are not supported", param="logprobs")
    requests, firsts, echoed = [], [], []
    for prompt in _prompts(body.prompt):
        tokens = text_tokens(served, prompt) if isinstance(prompt, str) else prompt
        if len(tokens) > served.most_tokens:
            raise too_long("prompt", served.most_tokens, str(len(tokens)))
        made = _requests(served, body, tokens, body.max_tokens or DEFAULT_COMPLETION, body.logprobs, scope)
        requests += made
        firsts += made[:1]
        if body.echo:
            text = prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(prompt)
            echoed += [text] * len(made)
    return Prepared(requests, firsts, echoed)


def chat_tokens(served: Served, messages: Sequence[Message], arguments: dict[str, Any] | None) -> list[int]:
    """A conversation in the chat template, if it can fit. Raises ApiError and InputError."""
    size = sum(_length(message["content"]) for message in messages)
    if len(messages) > served.most_tokens or size > served.most_characters:
        raise too_long("messages", served.most_tokens, f"{len(messages)} messages of {size} characters")
    tokens = served.engine.tokenizer.encode_messages(messages, arguments)
    if len(tokens) > served.most_tokens:
        raise too_long("messages", served.most_tokens, str(len(tokens)))
    return tokens


def text_tokens(served: Served, text: str, special: bool = True) -> list[int]:
    """A text, if it can fit, with the special tokens that the model wants around it. Raises ApiError and InputError."""
    if len(text) > served.most_characters:
        raise too_long("prompt", served.most_tokens, f"{len(text)} characters")
    tokenizer = served.engine.tokenizer
    return (tokenizer.encode if special else tokenizer.encode_part)(text) if text else []


def _requests(
    served: Served,
    body: Asked,
    tokens: list[int],
    most: int | None,
    logprobs: int | None,
    scope: str,
    prediction: str | None = None,
) -> list[Request]:
    """One for each choice of a prompt. Raises InputError."""
    options: RequestOptions = {
        "sampling": _sampling(served, body, logprobs),
        "ignore_eos": bool(body.ignore_eos),
        "stop_ids": body.stop_token_ids or (),
        "prefix_scope": scope,
        "learning": served.learning and body.learning is not False,
        "prediction": prediction,
    }
    return served.engine.requests(tokens, most, **options)


def _sampling(served: Served, body: Asked, logprobs: int | None) -> SamplingParams:
    """What was asked for over what the model recommends, or over OpenAI's defaults. Raises InputError."""
    recommended = served.engine.recommended
    fields: dict[str, Any] = {"temperature": 1.0} if recommended is None else recommended.changed
    fields |= {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.min_tokens:
        fields["min_new_tokens"] = body.min_tokens
    return SamplingParams.of({**fields, "logprobs": logprobs})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several as a list."""
    single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return [prompt] if single else prompt


def _length(content: str | list[dict[str, str]] | None) -> int:
    """Characters of a message."""
    if isinstance(content, list):
        return sum(len(part["text"]) for part in content)
    return len(content or "")

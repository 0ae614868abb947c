"""From the body of a call to the engine's requests. Runs in a thread: a long prompt takes a while."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..runtime.asked.prompt import RequestOptions
from ..runtime.asked.request import Request
from ..runtime.asked.sampling_params import SamplingParams
from .api_error import ApiError
from .field_errors import too_long
from .fields import ChatRequest, CommonFields, CompletionRequest, TokenizeRequest
from .room import require_room
from .served import Served
from .structured import names_as_sent, structured_of
from .tools.asked import tools_of
from .tools.conversation import Reading, grammar_of, reading_of, shown_tools

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
    reading: Reading | None = None  # how answers are read that may have reasoning or calls


def choices(body: CommonFields) -> int:
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
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    arguments = {**_of_effort(served, body.reasoning_effort), **body.arguments}
    tokens = _chat_tokens(served, body, arguments, tools is not None)
    reading = reading_of(served, tools, tokens)
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    likely = body.prediction.text if body.prediction else None
    if likely and len(likely) > served.most_characters:
        raise too_long("prediction", served.most_tokens, f"{len(likely)} characters")
    structured = structured_of(body)
    if tools is not None and reading is not None:
        with names_as_sent(body):
            structured = grammar_of(served, tools, reading, structured)
    requests = _requests(served, body, tokens, most, logprobs, scope, structured, likely, answers=True)
    if reading is not None:
        requests = [_shown_stops(served, request) for request in requests]
    return Prepared(requests, requests[:1], reading=reading)


def _of_effort(served: Served, effort: str | None) -> dict[str, Any]:
    """The variables by which a chat template is told how much to think. Raises ApiError for one that has none."""
    template = served.tokenizer.chat_template or ""
    if effort is None or not knows_effort(served):
        if effort in (None, "none"):
            return {}
        raise ApiError(
            400,
            f"reasoning_effort: expected none for {served.name}, whose chat template knows no other, got {effort}",
            param="reasoning_effort",
        )
    return {"reasoning_effort": effort} if "reasoning_effort" in template else {"enable_thinking": effort != "none"}


def knows_effort(served: Served) -> bool:
    """Whether a model's chat template can be told how much to think, or whether to."""
    template = served.tokenizer.chat_template or ""
    return "reasoning_effort" in template or "enable_thinking" in template


def prepare_completion(served: Served, body: CompletionRequest, scope: str) -> Prepared:
    """Raises ApiError and InputError for what the engine cannot take."""
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "logprobs: expected none beside echo: those of prompts are not supported", param="logprobs")
    requests, firsts, echoed = [], [], []
    for prompt in _prompts(body.prompt):
        tokens = text_tokens(served, prompt, body.parse_special) if isinstance(prompt, str) else prompt
        if len(tokens) > served.most_tokens:
            raise too_long("prompt", served.most_tokens, str(len(tokens)))
        made = _requests(
            served, body, tokens, body.max_tokens or DEFAULT_COMPLETION, body.logprobs, scope, structured_of(body)
        )
        requests += made
        firsts += made[:1]
        if body.echo:
            text = prompt if isinstance(prompt, str) else served.engine.tokenizer.decode(prompt)
            echoed += [text] * len(made)
    return Prepared(requests, firsts, echoed)


def _shown_stops(served: Served, request: Request) -> Request:
    """A request whose stop strings are looked for in the text that is read."""
    return replace(request, stop_text=request.stop_text and request.stop_text.over(served.shown_text))


def tokens_of(served: Served, body: TokenizeRequest) -> list[int]:
    """The token ids of a text, or of a conversation with its tools. Raises ApiError and InputError."""
    if body.messages is None:
        return text_tokens(served, body.prompt or "", body.parse_special, body.add_special_tokens is not False)
    tools = tools_of(body.tools, None, None)
    return _chat_tokens(served, body, body.chat_template_kwargs or {}, tools is not None)


def _chat_tokens(
    served: Served, body: ChatRequest | TokenizeRequest, arguments: dict[str, Any], calls: bool
) -> list[int]:
    """A conversation in the chat template, if it can fit: all that the template may write is counted before it runs.
    arguments: variables of the template. calls: whether the model may call tools. Raises ApiError and InputError."""
    messages: Sequence[dict[str, Any]] = [message.plain() for message in body.messages or []]
    if body.tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        messages, arguments = shown_tools(served, messages, arguments, body.tools or [], calls)
    if len(messages) > served.most_tokens:
        raise too_long("messages", served.most_tokens, f"{len(messages)} messages")
    for name, data in (("messages", messages), ("chat_template_kwargs", arguments)):
        require_room(served, name, data)
    tokens = served.engine.tokenizer.encode_messages(messages, arguments, parse_special=bool(body.parse_special))
    if len(tokens) > served.most_tokens:
        raise too_long("messages", served.most_tokens, str(len(tokens)))
    return tokens


def text_tokens(served: Served, text: str, parse_special: bool | None, around: bool = True) -> list[int]:
    """A text, if it can fit, with the special tokens that the model wants around it. Raises ApiError and InputError."""
    require_room(served, "prompt", text)
    tokenizer = served.engine.tokenizer
    encode = tokenizer.encode if around else tokenizer.encode_part
    return encode(text, parse_special=bool(parse_special)) if text else []


def _requests(
    served: Served,
    body: CommonFields,
    tokens: list[int],
    most: int | None,
    logprobs: int | None,
    scope: str,
    structured: dict[str, Any] | None,
    prediction: str | None = None,
    answers: bool = False,
) -> list[Request]:
    """One for each choice of a prompt. answers: whether that is a conversation. Raises InputError."""
    with names_as_sent(body):
        options: RequestOptions = {
            "sampling": _sampling(served, body, logprobs, structured),
            "chat": answers,
            "ignore_eos": bool(body.ignore_eos),
            "stop_ids": body.stop_token_ids or (),
            "prefix_scope": scope,
            "learning": served.learning and body.learning is not False,
            "prediction": prediction,
        }
        return served.engine.requests(tokens, most, **options)


def _sampling(
    served: Served, body: CommonFields, logprobs: int | None, structured: dict[str, Any] | None
) -> SamplingParams:
    """What was asked for over what the model recommends, or over OpenAI's defaults. Raises InputError."""
    recommended = served.engine.recommended
    fields: dict[str, Any] = {"temperature": 1.0} if recommended is None else recommended.changed
    fields |= {name: getattr(body, name) for name in SAME if getattr(body, name) is not None}
    if body.min_tokens:
        fields["min_new_tokens"] = body.min_tokens
    fields["structured"] = structured
    return SamplingParams.of({**fields, "logprobs": logprobs})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """One prompt or several as a list."""
    single = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return [prompt] if single else prompt

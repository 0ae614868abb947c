"""The tensors of a model: what they are called, what they hold, and how requests are read from them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import InputError
from ...report import TokenLogprobs
from ...runtime.asked.prompt import Prompt, RequestOptions
from ...runtime.asked.request import Request
from ...runtime.text.tokenizer import EngineTokenizer
from ..api_error import ApiError
from ..bridge import Grown
from ..forms import ChatForm, Json
from ..room import require_room
from ..served import Served
from .chat import CHAT_REQUEST, prepare


class Field(NamedTuple):
    """A tensor in one dimension: its type in config.pbtxt without TYPE_, its size, -1 for any, and what it means."""

    type: str
    size: int
    meaning: str


INPUTS = {
    "prompt": Field("STRING", 1, "a text; or token_ids, messages or chat_request: one of the four"),
    "token_ids": Field("INT32", -1, "a prompt as token ids"),
    "messages": Field("STRING", 1, 'a conversation as JSON: [{"role": "user", "content": "..."}]'),
    CHAT_REQUEST: Field(
        "STRING", 1, 'the body of a chat with tools, response_format and the rest, as JSON: {"messages": [...]}'
    ),
    "chat": Field("BOOL", 1, "put prompt through the chat template, as the user's turn"),
    "chat_template_kwargs": Field("STRING", 1, 'variables of the chat template as JSON: {"enable_thinking": false}'),
    "parse_special": Field("BOOL", 1, "names of special tokens in prompt or messages become tokens; false: text"),
    "max_new_tokens": Field("INT32", 1, "most new tokens; without it, what the context leaves"),
    "sampling": Field("STRING", 1, 'JSON: {"temperature": 0.7, "seed": 1}, or "model"; without it, greedy'),
    "ignore_eos": Field("BOOL", 1, "go on past the model's end-of-sequence tokens"),
    "stop_ids": Field("INT32", -1, "further tokens that end the output"),
}
OUTPUTS = {
    "text": Field("STRING", 1, "the text that is new, whole characters only; it may be empty"),
    "token_ids": Field("INT32", -1, "the tokens that are new"),
    "choice": Field("INT32", 1, "which of the n choices has grown"),
    "finish_reason": Field("STRING", 1, "stop, length or tool_calls in a choice's last response, empty before"),
    "prompt_tokens": Field("INT32", 1, "tokens of the prompt"),
    "completion_tokens": Field("INT32", 1, "new tokens of this choice so far"),
    "logprobs": Field(
        "STRING", 1, "JSON: [token, logprob, [[token, logprob], ...]] of each new token, where asked for"
    ),
    "delta": Field("STRING", 1, "JSON, to a chat_request: content, reasoning_content and tool_calls that are new"),
}
PROMPTS = ("prompt", "token_ids", "messages", CHAT_REQUEST)
Given = Mapping[str, np.ndarray]  # the inputs of a request that are there


class Ready(NamedTuple):
    """What is asked: a request for each choice. To a chat_request form tells the answers, and text makes text of their
    tokens, None for the engine's."""

    requests: Sequence[Request]
    form: ChatForm | None = None
    text: EngineTokenizer | None = None


def read(served: Served, given: Given) -> Ready:
    """What inputs ask for. Raises InputError."""
    prompts = [name for name in PROMPTS if name in given]
    if len(prompts) != 1:
        raise InputError(f"inputs: expected one of {', '.join(PROMPTS)}, got {' and '.join(prompts) or 'none'}")
    if prompts == [CHAT_REQUEST]:
        return _read_chat(served, given)
    prompt: Prompt = given["token_ids"].ravel().tolist() if prompts == ["token_ids"] else _text(prompts[0], given)
    if prompts == ["messages"]:
        prompt = _json("messages", given, list)
        _require_room(served, "messages", prompt)
    elif prompts == ["prompt"]:
        _require_room(served, "prompt", prompt)
    options: RequestOptions = {}
    if "sampling" in given:
        options["sampling"] = _json("sampling", given, dict | str)
    if "chat_template_kwargs" in given:
        options["chat_template_kwargs"] = _json("chat_template_kwargs", given, dict)
        _require_room(served, "chat_template_kwargs", options["chat_template_kwargs"])
    if "stop_ids" in given:
        options["stop_ids"] = given["stop_ids"].ravel().tolist()
    options["chat"] = bool(_one("chat", given, False))
    options["parse_special"] = bool(_one("parse_special", given, False))
    options["ignore_eos"] = bool(_one("ignore_eos", given, False))
    return Ready(served.engine.requests(prompt, _one("max_new_tokens", given, None), **options))


def _require_room(served: Served, name: str, data: Any) -> None:
    """Raises InputError for what no row can hold, ahead of the work of reading it."""
    try:
        require_room(served, name, data)
    except ApiError as error:
        raise InputError(str(error)) from None


def _read_chat(served: Served, given: Given) -> Ready:
    """Raises InputError."""
    beside = [name for name in given if name != CHAT_REQUEST]
    if beside:
        raise InputError(f"{beside[0]}: expected none beside {CHAT_REQUEST}, whose fields say all, got one")
    ready = prepare(served, _json(CHAT_REQUEST, given, dict))
    return Ready(ready.requests, ChatForm(None, False, ready.reading), served.shown_text if ready.reading else None)


def told(grown: Grown, form: ChatForm | None) -> dict[str, np.ndarray]:
    """The outputs of one response. form: see `Ready`."""
    request, logprobs = grown.request, grown.logprobs
    text, reason, delta = grown.text, request.finish_reason or "", ""
    if form is not None:
        new, reason = _new(grown, form, reason)
        text, delta = new.get("content", ""), json.dumps(new)
    return {
        "text": _string(text),
        "token_ids": np.array(grown.token_ids, np.int32),
        "choice": np.array([grown.choice], np.int32),
        "finish_reason": _string(reason),
        "prompt_tokens": np.array([len(request.prompt)], np.int32),
        "completion_tokens": np.array([len(request.tokens)], np.int32),
        "logprobs": _string(json.dumps([_logprobs(each) for each in logprobs]) if logprobs else ""),
        "delta": _string(delta),
    }


def _new(grown: Grown, form: ChatForm, reason: str) -> tuple[Json, str]:
    """What a chat's message grew by, with all that was held back where it ends, and why it ends."""
    choice = form.grown(grown.choice, grown.text, ())
    new: Json = choice["delta"] if choice else {}
    if reason in ("stop", "length"):
        end = form.end(grown.choice, reason)
        reason = end["finish_reason"]
        for name, rest in end["delta"].items():
            new[name] = new[name] + rest if name in new else rest
    return new, reason


def _logprobs(told: TokenLogprobs) -> list[Any]:
    return [told.token_id, told.logprob, [list(each) for each in told.top]]


def _string(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


def _one(name: str, given: Given, default: Any) -> Any:
    """The only element of an input, `default` where it is not there. Raises InputError."""
    if name not in given:
        return default
    if given[name].size != 1:
        raise InputError(f"{name}: expected one element, got {given[name].size}")
    return given[name].ravel()[0].item() if given[name].dtype != object else given[name].ravel()[0]


def _text(name: str, given: Given) -> str:
    """Raises InputError."""
    try:
        return bytes(_one(name, given, b"")).decode()
    except UnicodeDecodeError:
        raise InputError(f"{name}: expected UTF-8, got other bytes") from None


def _json(name: str, given: Given, kind: Any) -> Any:
    """Raises InputError."""
    try:
        value = json.loads(_text(name, given))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: expected JSON, got what does not parse") from None
    if not isinstance(value, kind):
        raise InputError(f"{name}: expected JSON of the form that config.pbtxt shows, got {type(value).__name__}")
    return value

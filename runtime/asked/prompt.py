"""What users may give as a prompt, and how it becomes token ids."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypedDict, TypeGuard

from ...errors import InputError
from ..text.tokenizer import EngineTokenizer, Message
from .allowed_tokens import AllowedTokens
from .sampling_params import SamplingArgument


class Array(Protocol):
    """A numpy array or a torch tensor."""

    def tolist(self) -> Any:
        """Nested lists."""
        ...


Prompt = str | Sequence[int] | Sequence[Message]  # text, token ids, or a conversation
Prediction = str | Sequence[int] | None  # text or token ids


class RequestOptions(TypedDict, total=False):
    """What may be asked of a prompt beside its length. `generate` takes one `sampling` and one `prediction` for all
    prompts, or a list with one for each."""

    # How tokens are chosen; "model" for what the model recommends, None for greedy.
    sampling: SamplingArgument | Sequence[SamplingArgument | None] | None
    # Put a text through the chat template, as the user's turn. A conversation always goes through it; token ids are one
    # that went through it.
    chat: bool
    ignore_eos: bool  # go on past the model's end-of-sequence tokens
    stop_ids: Sequence[int]  # further tokens that end the output
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the chat template, as {"enable_thinking": False}
    # Called before each step with the output so far and the tree of the coming step -> which tokens may follow each
    # node, see docs/sampling.md.
    allowed_tokens: AllowedTokens | None
    forced_acceptance: bool  # take an engine that was built to accept drafts right or wrong, for its speed
    # A request starts from what was kept of requests of the same scope alone, where the engine keeps prefixes; how long
    # it takes tells what others asked.
    prefix_scope: str
    # Text or token ids that the answer will probably repeat, as a file that it edits: it is drafted from, at the place
    # where the answer is, and changes nothing but the speed. Engines whose drafter has no n-grams ignore it.
    prediction: Prediction | Sequence[Prediction]
    learning: bool  # whether the output may be counted for the drafts of later requests
    # Whether special tokens that a prompt has the names of, as "<|im_end|>", become tokens; by default they do in a
    # text, and not in what goes through the chat template.
    parse_special: bool | None


def split_prompts(prompts: Any) -> tuple[bool, list[Any]]:
    """Whether it is a single prompt, and the prompts. Raises InputError."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str) or is_conversation(prompts):
        return True, [prompts]
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"prompts: expected text, token ids, messages, or a list of these, got {type(prompts).__name__}"
        )
    single = len(prompts) > 0 and not hasattr(prompts[0], "__iter__")
    return single, [prompts] if single else list(prompts)


def one_each(given: Any, count: int, name: str) -> list[Any]:
    """What is asked of each of so many prompts, given for all of them or as a list. Raises InputError."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise InputError(f"{name}: expected one for all prompts, or one for each of {count}, got {len(given)}")
    return list(given)


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list of messages, or a message that lacks its list."""
    return isinstance(prompt, Mapping) or (
        isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    )


def encode(
    tokenizer: EngineTokenizer,
    prompt: str | Sequence[Message],
    chat: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
    name: str,
    parse_special: bool | None,
) -> list[int]:
    """Token ids of a text, with `chat` as the user's turn, or of a conversation. An empty text stays empty, whatever a
    chat template would put around it. parse_special: see `RequestOptions`. Raises InputError."""
    if prompt == "":
        return []
    if isinstance(prompt, str) and not chat:
        return tokenizer.encode(prompt, parse_special=parse_special is not False)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.encode_messages(messages, chat_template_kwargs, name, parse_special=bool(parse_special))


def at_least_one(value: Any, default: int, name: str) -> int:
    """A number of 1 or more, `default` for None. Raises InputError."""
    if value is None:
        return default
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise InputError(f"{name}: expected an integer of at least 1, got {value!r}")
    return number


def token_ids(values: Any, vocabulary: int, name: str) -> list[int]:
    """Values as token ids. Raises InputError."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputError(f"{name}: expected a list of integers, got {type(values).__name__}")
    tokens = []
    for value in values:
        try:
            tokens.append(operator.index(value))
        except TypeError:
            raise InputError(f"{name}: expected integers from 0 to {vocabulary - 1}, got {value!r}") from None
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    if wrong:
        raise InputError(f"{name}: expected integers from 0 to {vocabulary - 1}, got {wrong[0]}")
    return tokens

"""What of an answer is a model's reasoning: its template knows marks around it, or channels."""

from collections.abc import Sequence
from dataclasses import dataclass

from .channels import Channels, has_channels
from .tokenizer import EngineTokenizer

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
TAIL = 16  # tokens of a prompt that tell whether it ends inside reasoning


@dataclass(frozen=True)
class Reasoning:
    """begin, end: the marks around it. opened: whether the prompt ends inside it; otherwise the answer may begin it."""

    begin: str
    end: str
    opened: bool


def reasoning_of(text: EngineTokenizer, prompt: Sequence[int]) -> Reasoning | Channels | None:
    """That of the answer to a conversation. None for a model that has none, or where the prompt ends it."""
    if has_channels(text.chat_template):
        return Channels()
    template = text.chat_template or ""
    marks = next(((begin, end) for begin, end in MARKS if begin in template or end in template), None)
    if marks is None:
        return None
    tail = text.tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False).rstrip()
    return None if tail.endswith(marks[1]) else Reasoning(*marks, opened=tail.endswith(marks[0]))

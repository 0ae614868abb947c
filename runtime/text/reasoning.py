"""What of an answer is a model's reasoning: its template knows marks around it, or channels."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .channels import Channels, has_channels, reasoning_spans
from .tokenizer import EngineTokenizer

MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
TAIL = 16  # tokens of a prompt that tell whether it ends inside reasoning


@dataclass(frozen=True)
class Reasoning:
    """begin, end: the marks around it. opened: whether the prompt ends inside it; otherwise the answer may begin it."""

    begin: str
    end: str
    opened: bool

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where that of an answer begins and ends, marks included."""
        if self.opened or text.lstrip().startswith(self.begin):
            end = text.find(self.end)
            yield 0, len(text) if end < 0 else end + len(self.end)


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


def reasoning_tokens(text: EngineTokenizer, reasoning: Reasoning | Channels, answer: Sequence[int]) -> int:
    """How many tokens of an answer are reasoning, its marks included."""

    def written(count: int) -> str:
        return text.tokenizer.decode(list(answer[:count]), skip_special_tokens=False)

    def tokens_of(characters: int) -> int:
        if characters == len(whole):  # the last token may be a part of a character
            return len(answer)
        return bisect_left(range(len(answer) + 1), characters, key=lambda count: len(written(count)))

    whole = written(len(answer))
    spans = reasoning_spans(whole) if isinstance(reasoning, Channels) else reasoning.spans(whole)
    return sum(tokens_of(end) - tokens_of(start) for start, end in spans)

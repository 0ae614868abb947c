"""Answers in channels, as gpt-oss writes them (harmony): messages with a header each, told apart by special tokens."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
ENDS = (START, END, CALL, RETURN)  # of a message
SHOWN = (CHANNEL, MESSAGE, CONSTRAIN, START, END, CALL)  # marks without which an answer cannot be read


@dataclass(frozen=True)
class Channels:
    """Says that a model answers in channels: `analysis` is its reasoning, `final` its answer, and `commentary` what it
    says ahead of a call, or the call itself."""


@dataclass(frozen=True)
class ChannelMessage:
    """A message as far as it is certain. recipient: whom it is for, empty for the user."""

    channel: str
    recipient: str
    body: str


def has_channels(template: str | None) -> bool:
    """Whether a chat template writes answers in channels."""
    return template is not None and CHANNEL in template and MESSAGE in template


def channel_messages(text: str, done: bool) -> Iterator[ChannelMessage]:
    """The messages of an answer so far, with `done` of all of it. What stands in no channel is for the user."""
    parts = _BETWEEN.split(text)
    for number, part in enumerate(parts):
        grows = not done and number == len(parts) - 1
        header, begun, body = part.partition(MESSAGE)
        if not begun:
            if number or grows or CHANNEL in header:  # a header that is not whole, or blanks between messages
                continue
            header, body = "", part
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        body = body[: len(body) - _held(body)] if grows else body
        yield ChannelMessage(channel[1] if channel else "", recipient[1] if recipient else "", body)


def reasoning_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where the reasoning of an answer begins and ends, heads and marks included."""
    start = 0
    for end in [*(mark.end() for mark in _BETWEEN.finditer(text)), len(text)]:
        header, begun, _ = text[start:end].partition(MESSAGE)
        channel = _CHANNEL.search(header)
        if begun and channel is not None and channel[1] == "analysis":
            yield start, end
        start = end


_BETWEEN = re.compile("|".join(map(re.escape, ENDS)))
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")


def _held(body: str) -> int:
    """How much of the end of a text may become a mark that ends a message."""
    longest = max(map(len, ENDS)) - 1
    sizes = range(min(longest, len(body)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(body[-size:]) for mark in ENDS)), 0)

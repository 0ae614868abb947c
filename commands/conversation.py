"""Conversations for the commands: their options, and a history that fits an engine."""

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.text.messages import Message

SYSTEM_ROLES = ("system", "developer")


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """--system and --template-arg, for commands that use the chat template."""
    parser.add_argument("--system", metavar="TEXT", help="system message, where a conversation does not bring its own")
    parser.add_argument(
        "--template-arg",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="variable of the chat template, as enable_thinking=false: JSON, or else text; may be given again",
    )


def given_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What --template-arg says. Raises InputError."""
    arguments = {}
    for given in options.template_arg:
        name, equals, value = given.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"template-arg: expected NAME=VALUE, got {given!r}")
        try:
            arguments[name] = json.loads(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments


def with_system(prompt: Any, system: str | None) -> Any:
    """A text or a conversation under a system message, unless it has one; token ids and an empty prompt stay."""
    if not system or not prompt:
        return prompt
    first = {"role": "system", "content": system}
    if isinstance(prompt, str):
        return [first, {"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(prompt[0], dict) and prompt[0].get("role") not in SYSTEM_ROLES:
        return [first, *prompt]
    return prompt


class History:
    """A conversation that an engine can go on with: it forgets its oldest turns when it grows too long.

    A turn is a message of the user with all that follows up to the next one. An answer is left a quarter of the
    engine's max_seq_len, or max_new_tokens if that is less.
    """

    def __init__(
        self,
        engine: "Engine",
        system: str | None,
        arguments: dict[str, Any],
        max_new_tokens: int | None = None,
        encode: "Callable[[Sequence[Message], dict[str, Any]], list[int]] | None" = None,
    ):
        """arguments: variables of the chat template. encode: makes token ids of messages and of these, None: the
        engine's tokenizer does. Raises InputError for an engine without a tokenizer."""
        self._encode, self._arguments = encode or engine.tokenizer.encode_messages, arguments
        self._longest = engine.spec.max_seq_len
        self._room = min(max_new_tokens or self._longest, self._longest // 4)
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = self._start

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = self._start

    def prompt(self, text: str) -> tuple[list["Message"], list[int], int]:
        """The messages with another one of the user, see `fitting`."""
        return self.fitting([*self.messages, {"role": "user", "content": text}])

    def fitting(self, messages: list["Message"]) -> tuple[list["Message"], list[int], int]:
        """Messages as far as they fit, their token ids, and how many turns had to be left out. The last turn stays,
        whatever its length. Raises InputError for what the template refuses."""
        dropped = 0
        while True:
            tokens = self._encode(messages, self._arguments)
            second = _second_turn(messages)
            if len(tokens) + self._room <= self._longest or second is None:
                return messages, tokens, dropped
            messages, dropped = [*self._start, *messages[second:]], dropped + 1

    def answered(self, messages: Sequence["Message"], answer: str | dict[str, Any]) -> None:
        """Keep what `prompt` returned, with its answer, a text or a message. A question without any answer is
        forgotten: templates want turns to alternate."""
        if answer:
            said: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
            self.messages = [*messages, said]


def _second_turn(messages: Sequence["Message"]) -> int | None:
    """Where the second turn begins, None where there is one only."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return turns[1] if len(turns) > 1 else None

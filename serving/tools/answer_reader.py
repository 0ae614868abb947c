"""Reads an answer as it grows: the model's reasoning, its text, and its calls."""

import secrets
import string
from dataclasses import dataclass, field, replace

from ...runtime.calls.channel_calls import ChannelCalls
from ...runtime.calls.tool import Tools
from ...runtime.calls.written import ReadAnswer, ToolFormat, WrittenCall
from ...runtime.text.reasoning import Reasoning
from .custom import input_text
from .grammar import LEAD

ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # the form of ids that Mistral's templates insist on


@dataclass
class GrownAnswer:
    """What an answer grew by. calls: each call's number, its id and name where it is new, and text of its arguments
    or, for a custom tool, of its input."""

    reasoning: str
    content: str
    calls: list[tuple[int, tuple[str, str] | None, str]]


@dataclass
class AnswerReader:
    """The reader of one answer. What it says does not depend on the pieces that the text comes in."""

    reasoning: Reasoning | None  # marks of the model's reasoning; None: it has none
    tools: Tools | None  # of this answer; None: none
    form: ToolFormat  # how the model writes calls
    ids: list[str] = field(default_factory=list)  # of the calls so far
    _text: str = ""  # all that came
    _told: ReadAnswer = field(default_factory=ReadAnswer)  # all that was told

    @property
    def answer(self) -> ReadAnswer:
        """All that was told so far."""
        return self._told

    def push(self, text: str, last: bool = False) -> GrownAnswer:
        """Add text, with `last` the last of it -> what is certain now and was not told."""
        self._text += text
        told, self._told = self._told, self._with_inputs(self._read(last))
        calls: list[tuple[int, tuple[str, str] | None, str]] = []
        for index, call in enumerate(self._told.calls):
            if index == len(told.calls):
                self.ids.append("".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH)))
                calls.append((index, (self.ids[index], call.name), call.arguments))
                told = ReadAnswer(told.reasoning, told.content, [*told.calls, call])
            elif new := call.arguments[len(told.calls[index].arguments) :]:
                calls.append((index, None, new))
        reasoning = self._told.reasoning[len(told.reasoning) :]
        return GrownAnswer(reasoning, self._told.content[len(told.content) :], calls)

    def _with_inputs(self, answer: ReadAnswer) -> ReadAnswer:
        """An answer in which calls of custom tools have their text in place of a function's arguments."""
        custom = {tool.name for tool in self.tools.tools if tool.custom} if self.tools else set()
        if not custom:
            return answer
        calls = [
            WrittenCall(call.name, input_text(call.arguments), True, call.is_whole) if call.name in custom else call
            for call in answer.calls
        ]
        return replace(answer, calls=calls)

    def _read(self, done: bool) -> ReadAnswer:
        if isinstance(self.form, ChannelCalls):
            return self.form.read_answer(self._text, self.tools, done)
        if self.reasoning is None:
            return self._content("", self._text, done)
        text, begin = self._text, self.reasoning.begin
        if not self.reasoning.opened:
            start = text.lstrip()
            if not done and begin.startswith(start):
                return ReadAnswer()
            if not start.startswith(begin):
                return self._content("", text, done)
            text = start.removeprefix(begin)
        thought, ended, rest = text.partition(self.reasoning.end)
        if ended:
            return self._content(thought.strip(), rest.lstrip(), done)
        return ReadAnswer(thought.lstrip() if done else _certain(thought.lstrip(), self.reasoning.end))

    def _content(self, reasoning: str, text: str, done: bool) -> ReadAnswer:
        """An answer of which the reasoning is known."""
        if self.tools is None:
            return ReadAnswer(reasoning, text)
        if self.form.leads:
            start = text.lstrip().removeprefix(LEAD)
            if not done and (self.form.opening.startswith(start) or LEAD.startswith(start)):
                return ReadAnswer(reasoning)
            named = start.removeprefix(self.form.opening)
            names = [tool.name for tool in self.tools.tools]
            begun = bool(named) or not done
            calls = any(named.startswith(name) or (begun and name.startswith(named)) for name in names)
            at = len(text) - len(start) if calls and start.startswith(self.form.opening) else -1
            content = "" if at >= 0 else text
        else:
            at = text.find(self.form.opening)
            content = text[:at].rstrip() if at >= 0 else text if done else _certain(text, self.form.opening)
        return ReadAnswer(reasoning, content, self.form.read(text[at:], self.tools.tools) if at >= 0 else ())


def _certain(text: str, mark: str) -> str:
    """A text without what may become a mark, and without the blanks ahead of that."""
    held = next((length for length in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:length])), 0)
    return text[: len(text) - held].rstrip()

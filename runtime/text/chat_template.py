"""Chat templates: conversations as the text that a model was trained on, rendered as transformers renders them.

Templates come from whoever published the model, so they run in Jinja's sandbox and see plain data only.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import InputError
from .messages import Message

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of an assistant's reasoning, the usual one first
RESERVED = ("messages", "chat_template", "continue_final_message", "tokenize")
PROBE = "specstep-probe"
DEEPEST = 64  # levels of lists and mappings in what a template is given


class ChatTemplate:
    """A Jinja chat template. Compiled at its first use: a model can be given raw prompts whatever its template is."""

    def __init__(self, source: str, special: Mapping[str, str]):
        """special: the named special tokens that the template sees, such as bos_token."""
        self.source, self._special = source, dict(special)

    def render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any] | None = None,
        rewrite: Callable[[Any], Any] = lambda data: data,
    ) -> str:
        """Render checked messages, ready for the assistant's answer.

        Args:
            arguments: further variables of the template, such as `enable_thinking`, `tools` or `documents`. They
                replace special tokens and `add_generation_prompt` of the same name.
            rewrite: changes the texts of what the template is given, messages and arguments, but for special tokens.

        Raises:
            InputError: a template that does not parse or that refuses the messages, with its line; a reserved
                argument; data that JSON could not hold.
        """
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise InputError(
                f"chat_template_kwargs: expected a mapping of names to values, got {type(arguments).__name__}"
            )
        reserved = [name for name in RESERVED if name in arguments]
        if reserved:
            raise InputError(
                f"chat_template_kwargs: expected names other than {', '.join(RESERVED)}, got {reserved[0]}"
            )
        conversation = [self._message(message) for message in messages]
        given = _plain(arguments, "chat_template_kwargs")
        own = {name: given.pop(name) for name in self._special if name in given}
        conversation, given = rewrite([conversation, given])
        return self._render(conversation, given | own)

    def _render(self, conversation: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        known = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._compiled.render({**known, **self._special, **arguments, "messages": conversation})
        except Exception as error:  # a template can raise anything that Python can
            raise InputError(f"chat_template: {_at(error)}{_one_line(error)}") from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)

    def _message(self, message: Message) -> dict[str, Any]:
        """A message as templates expect it: plain data without keys that hold None, its reasoning under each name."""
        plain = {key: _plain(value, f"messages: {key}") for key, value in message.items() if value is not None}
        if plain["role"] == "developer" and not self.takes_developer:
            plain["role"] = "system"
        if isinstance(plain.get("content"), list | tuple) and not self._takes_parts_of(plain["role"]):
            plain["content"] = "\n".join(part["text"] for part in plain["content"])
        if plain.get("tool_calls"):
            as_data, content = self.calls_shape
            plain = content | plain
            if not as_data:
                plain["tool_calls"] = [_with_text(call) for call in plain["tool_calls"]]
        reasoning = next((plain[name] for name in REASONING if plain.get(name) is not None), None)
        if reasoning is None:
            return plain
        return {"thinking": reasoning, **plain, "reasoning_content": reasoning}

    @cached_property
    def calls_shape(self) -> tuple[bool, dict[str, Any]]:
        """How the template reads tool calls, found by trying: whether their arguments are data rather than the text of
        a JSON object, and the content of a message that has none beside them."""
        asked, call = {"role": "user", "content": "u"}, {"id": "call00001", "type": "function"}
        for as_data in (True, False):
            function = {"name": PROBE, "arguments": {"a": PROBE} if as_data else f'{{"a": "{PROBE}"}}'}
            calls = [call | {"function": function}]
            for content in ({}, {"content": None}, {"content": ""}):
                message = {"role": "assistant", **content, "tool_calls": calls}
                with contextlib.suppress(InputError):
                    if PROBE in self._render([asked, message], {}):
                        return as_data, content
        return True, {"content": ""}

    @cached_property
    def takes_developer(self) -> bool:
        """Whether the template speaks of developers, and writes what one says. Many write any role's name, also one
        that their models were not taught. OpenAI's models took the role in place of `system`."""
        with contextlib.suppress(InputError):
            said = [{"role": "developer", "content": PROBE}, {"role": "user", "content": "u"}]
            return "developer" in self.source and PROBE in self._render(said, {})
        return False

    def _takes_parts_of(self, role: str) -> bool:
        """Whether the template reads content of a role that is a list of parts, found by trying: one that does not
        fails, leaves parts out, or prints the list as data, in quotes. Parts are joined with newlines for it."""
        if role not in self._takes_parts:
            self._takes_parts[role] = self._tries_parts(role)
        return self._takes_parts[role]

    @cached_property
    def _takes_parts(self) -> dict[str, bool]:
        return {}

    def _tries_parts(self, role: str) -> bool:
        texts = (PROBE, f"{PROBE}-2")
        said: dict[str, Any] = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        user: dict[str, Any] = {"role": "user", "content": "u"}
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
        as_data, content = self.calls_shape if role == "tool" else (True, {})
        called: dict[str, Any] = {"role": "assistant", **content, "tool_calls": [call if as_data else _with_text(call)]}
        result = {"tool_call_id": "call00001", **said}
        around = {"user": [said], "assistant": [user, said, user], "tool": [user, called, result]}
        try:
            rendered = self._render(around.get(role, [said, user]), {})
        except InputError:
            return False
        return all(re.search(rf"(?<!['\"]){text}(?!-)", rendered) for text in texts)


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are the text of a JSON object."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers offers to templates, no more and no less."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's answer for training. Here its body is all that counts. It is a call
    block as in transformers, since what a template sets inside must not be seen outside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


class _Dict:
    """`dict` without the class behind it, a way out of the sandbox."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without names that begin with an underscore, another way out."""

    def __init__(*arguments: Any, **attributes: Any) -> None:  # `self` is a name that a template may use
        self, *pairs = arguments
        first = dict(*pairs, **attributes)
        for name in first:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, first)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace: expected names without a leading underscore, got {name!r}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is. Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain(value: Any, place: str, levels: int = DEEPEST) -> Any:
    """A copy of nothing but JSON's types: a method of any other object could lead out of the sandbox."""
    if isinstance(value, Mapping | list | tuple) and not levels:
        raise InputError(f"{place:.60}: expected at most {DEEPEST} levels of lists and mappings, got more")
    if isinstance(value, Mapping):
        return {_plain(key, place): _plain(item, f"{place}.{key}", levels - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, place, levels - 1) for item in value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):  # enums and the like
        if isinstance(value, kind):
            return getattr(kind, f"__{kind.__name__}__")(value)
    raise InputError(f"{place}: expected what JSON can hold, got {type(value).__name__}")


def _at(error: Exception) -> str:
    """ "line N: " of the template, empty where the error does not tell."""
    line = getattr(error, "lineno", None)  # a template that does not parse
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: " if line else ""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__}: {text}"

"""Chat templates: every family's constructs, rendered as transformers renders them."""

import contextlib
from datetime import datetime
from pathlib import Path

import pytest
import specstep
from models import tiny_tokenizer
from specstep.runtime.text import chat_template
from specstep.runtime.text.chat_template import ChatTemplate
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

TEMPLATES = {path.stem: path.read_text() for path in (Path(__file__).parents[2] / "data/chat_templates").glob("*.j*")}
REFERENCE = tiny_tokenizer()
SPECIAL = REFERENCE.special_tokens_map

USER = {"role": "user", "content": ' What\'s <b>bold</b> & "früh" 🙂?\n '}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is so.\n"}
THOUGHT = {"role": "assistant", "content": "Done.", "reasoning_content": "first this,\nthen that"}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "sky", "arguments": {"at": "Köln <x>", "n": [1, 2.5]}},
        }
    ],
}
TOOL = {"role": "tool", "name": "sky", "tool_call_id": "abcdefghi", "content": '{"colour": "blau & grün"}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sky",
            "description": "The sky <above> a town",
            "parameters": {
                "type": "object",
                "required": ["at"],
                "properties": {
                    "at": {"type": "string", "description": "Straße", "default": "Köln"},
                    "n": {"type": "array", "items": {"type": "number"}, "nullable": True, "default": [1]},
                    "how": {"type": ["string", "null"]},
                    "box": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {}}, "required": ["a"]},
                },
            },
        },
    }
]

CONVERSATIONS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "  Be <brief> & tidy. "}, USER],
    "system switches": [{"role": "system", "content": "Be brief. /no_think"}, USER, ANSWER, USER],
    "system overrides": [{"role": "system", "content": "Alone. /system_override"}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "several turns": [USER, ANSWER, USER, THOUGHT, {"role": "user", "content": "And?"}],
    "ends with an answer": [USER, ANSWER],
    "two of the user": [USER, USER],
    "call": [USER, CALL],
    "call and answer": [USER, CALL | {"thinking": "the sky?"}, TOOL],
    "empty content beside a call": [USER, CALL | {"content": None, "reasoning": "so"}, TOOL, TOOL, THOUGHT, USER],
    "two calls": [USER, CALL | {"tool_calls": CALL["tool_calls"] * 2}, TOOL],
    "tool out of nowhere": [USER, TOOL],
    "empty text": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
}
ARGUMENTS = {
    "none": {},
    "thinking": {"enable_thinking": True},
    "no thinking": {"enable_thinking": False, "reasoning_effort": "high", "model_identity": "I <am>"},
    "tools": {"tools": TOOLS, "documents": [{"title": "t", "text": "x"}]},
    "date": {"date_string": "1 May 2020", "bos_token": "<other>"},
    "no prompt": {"add_generation_prompt": False},
}


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    """Both sides look at a clock. It must not tick between them."""

    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 9, 12, 30)

    monkeypatch.setattr(chat_template, "datetime", Frozen)
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)


def reference(source, messages, arguments):
    """What transformers renders, or None where its template refuses."""
    arguments = {"add_generation_prompt": True} | arguments
    try:
        return REFERENCE.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
    except Exception:
        return None


@pytest.mark.parametrize("family", TEMPLATES)
def test_equals_transformers(family):
    template, rendered = ChatTemplate(TEMPLATES[family], SPECIAL), 0
    for name, messages in CONVERSATIONS.items():
        for given, arguments in ARGUMENTS.items():
            expected = reference(TEMPLATES[family], messages, arguments)
            if name == "developer" and "developer" not in TEMPLATES[family]:  # nor one of a role that it was not taught
                system = [message | {"role": "system"} for message in messages[:1]] + messages[1:]
                expected = reference(TEMPLATES[family], system, arguments)
            if expected is None:  # a call may lack its content; then it is empty
                filled = [message | {"content": message.get("content") or ""} for message in messages]
                expected = reference(TEMPLATES[family], filled, arguments)
            if expected is None:
                with pytest.raises(specstep.InputError):
                    template.render(messages, arguments)
            else:
                assert template.render(messages, arguments) == expected, (name, given)
                rendered += 1
    assert rendered > len(ARGUMENTS) * 3, "the template refuses almost everything: a test of nothing"


@pytest.mark.parametrize("family", TEMPLATES)
def test_marks_of_special_tokens_change_nothing_where_there_are_none(family):
    """Names of special tokens in messages are marked before a template runs, and so are parts that could become one."""
    tokenizer = Tokenizer.from_str(REFERENCE.backend_tokenizer.to_str())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "[INST]", "<bold>"])
    text = EngineTokenizer(tokenizer, TEMPLATES[family], SPECIAL)
    for messages in CONVERSATIONS.values():
        for arguments in ARGUMENTS.values():
            with contextlib.suppress(specstep.InputError):
                expected = text.encode_messages(messages, arguments, parse_special=True)
                assert text.encode_messages(messages, arguments) == expected


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_call_needs_no_content(family):
    """Agents send it without. Where a template wants some, it is empty."""
    template = ChatTemplate(TEMPLATES[family], SPECIAL)
    for arguments in ARGUMENTS.values():
        expected = reference(TEMPLATES[family], [USER, CALL | {"content": ""}, TOOL], arguments)
        if expected is not None:
            assert template.render([USER, CALL, TOOL], arguments)


def test_each_construct_is_met():
    written = "".join(TEMPLATES.values())
    for construct in (
        "{% generation %}", "continue", "break", "namespace(", "macro", "strftime_now(", "tojson(indent=",
        "ensure_ascii", "raise_exception(", ".split(", ".strip(", ".startswith(", "messages[1:]", "[::-1]",
        "is defined", "is string", "is mapping", "dict(", "selectattr", "bos_token", "enable_thinking",
    ):  # fmt: skip
        assert construct in written


def test_thinking_date_and_json_look_as_they_should():
    """Equal to transformers, and to what a reader expects: a guard against both being wrong or empty."""
    quiet = ChatTemplate(TEMPLATES["qwen3"], SPECIAL).render([USER], {"enable_thinking": False})
    assert quiet.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert ChatTemplate(TEMPLATES["qwen3"], SPECIAL).render([USER]).endswith("<|im_start|>assistant\n")
    assert "Date: 2026-03-09" in ChatTemplate(TEMPLATES["gpt_oss"], SPECIAL).render([USER])
    assert '{"at": "Köln <x>", "n": [1, 2.5]}' in ChatTemplate(TEMPLATES["llama3"], SPECIAL).render([USER, CALL])


def test_refusals_are_one_line_with_the_templates_words_and_line():
    def refusal(source, messages=(USER,), arguments=None):
        with pytest.raises(specstep.InputError) as caught:
            ChatTemplate(source, SPECIAL).render(list(messages), arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    system = [{"role": "system", "content": "x"}, USER]
    assert refusal(TEMPLATES["gemma2"], system) == "chat_template: line 1: no system role"
    assert refusal(TEMPLATES["gemma3"], [USER, USER]) == "chat_template: line 10: user and assistant take turns"
    assert "reasoning belongs in 'thinking', not" in refusal(
        TEMPLATES["gpt_oss"], [USER, {"role": "assistant", "content": "<|channel|>"}]
    )
    assert refusal("a\n{% if %}").startswith("chat_template: line 2: Expected an expression")
    assert refusal("\n\n{{ messages[0].x.y }}").startswith("chat_template: line 3: ")
    assert refusal("\n{{ 1 / 0 }}") == "chat_template: line 2: ZeroDivisionError: division by zero"
    assert "chat_template_kwargs: " in refusal("x", arguments={"messages": []})
    assert "chat_template_kwargs.when: expected what JSON can hold, got datetime" in refusal(
        "x", arguments={"when": datetime.now()}
    )


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ dict.__class__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''.format.__self__.__class__ }}",
    ],
)
def test_sandbox_holds(attack):
    with contextlib.suppress(specstep.InputError):
        assert ChatTemplate(attack, SPECIAL).render([USER]) == ""


def test_text_parts_reach_templates_that_read_them_and_are_joined_for_the_others():
    for family in TEMPLATES:
        template = ChatTemplate(TEMPLATES[family], SPECIAL)
        joined = PARTS | {"content": " one \ntwo"}
        if family == "gemma3":
            assert template.render([PARTS]) == reference(TEMPLATES[family], [PARTS], {})
        else:
            assert template.render([PARTS]) == template.render([joined]), family


def test_the_callers_messages_stay_as_they_were():
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": CALL["tool_calls"], "thinking": "x"}]
    before = repr(messages)
    ChatTemplate(TEMPLATES["gpt_oss"], SPECIAL).render(messages, {"tools": TOOLS})
    assert repr(messages) == before


def test_parts_are_joined_for_each_role_whose_content_a_template_takes_as_a_text():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{{ m.tool_calls }};{% endfor %}",
        {},
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": role, "content": parts} for role in ("system", "user", "assistant")]
    assert template.render(said) == "a\nb;ab;a\nb;"
    assert template.render([USER, CALL, TOOL | {"content": parts}]).endswith(";a\nb;")

"""Prompts of a file, and what makes requests of them."""

import json

import pytest
import specstep
from specstep.cli import main
from specstep.commands.conversation import with_system
from specstep.commands.prompts import make_requests, read_prompts

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def entries(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    return read_prompts(str(path))


class Recorder:
    """Takes the place of an engine and writes down what it is asked for."""

    def request(self, prompt, max_new_tokens, **options):
        return prompt, options


def test_each_kind_of_prompt(tmp_path):
    found = entries(
        tmp_path,
        {"prompt": "text\u2028of two lines\x85"},
        {"messages": [SYSTEM, USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"token_ids": [3, 4]},
        {"turns": ["first", "second"], "category": "x"},
    )
    assert [entry.prompt for entry in found] == ["text\u2028of two lines\x85", [SYSTEM, USER], [3, 4], "first"]
    assert [entry.chat_template_kwargs for entry in found] == [{}, {"enable_thinking": False}, {}, {}]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"messages": []}, "line 1: messages: expected at least one message"),
        ({"messages": [USER, {"role": "x", "content": ""}]}, r"line 1: messages\[1\].role: expected one of system"),
        ({"messages": "hi"}, 'expected one of "prompt"'),
        ({"prompt": "x", "messages": [USER]}, 'expected one of "prompt"'),
        ({"prompt": "x", "chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object, got"),
        ({}, 'expected one of "prompt"'),
    ],
)
def test_bad_lines_are_errors_in_their_place(tmp_path, line, error):
    [entry] = entries(tmp_path, line)
    assert isinstance(entry.prompt, specstep.InputError)
    with pytest.raises(specstep.InputError, match=f"prompts: .*{error}"):
        raise entry.prompt


def test_a_lines_chat_template_kwargs_win_over_those_of_all(tmp_path):
    found = entries(tmp_path, {"id": "a", "messages": [USER], "chat_template_kwargs": {"tone": "dry"}}, {"prompt": "x"})
    made = make_requests(Recorder(), found, 5, chat=True, chat_template_kwargs={"tone": "wet", "n": 1})
    [(_, (prompt, options)), (_, (_, others))] = made
    assert prompt == [USER]
    assert options == {
        "chat": True, "ignore_eos": False, "chat_template_kwargs": {"tone": "dry", "n": 1}, "name": "prompt a",
    }  # fmt: skip
    assert others["chat_template_kwargs"] == {"tone": "wet", "n": 1}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [SYSTEM, USER]),
        ([USER], [SYSTEM, USER]),
        ([{"role": "developer", "content": "x"}, USER], [{"role": "developer", "content": "x"}, USER]),
        ([3, 4], [3, 4]),
        ("", ""),
        ([], []),
    ],
)
def test_a_system_message_goes_first_unless_there_is_one(prompt, expected):
    assert with_system(prompt, "be brief") == expected
    assert with_system(prompt, None) == prompt


def test_generate_takes_conversations_and_a_system_message(engine_folder, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [{"prompt": "hi"}, {"messages": [SYSTEM, USER]}]))
    options = ["--system", "be brief", "--max-new-tokens", "3", "--json"]
    assert main(["generate", str(engine_folder), "--prompts", str(path), *options]) == 0
    text, messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    with specstep.load(engine_folder) as engine:
        assert text["prompt_token_ids"] == engine.tokenizer.encode_messages([SYSTEM, USER])
    assert messages["prompt_token_ids"] == text["prompt_token_ids"] and messages["token_ids"] == text["token_ids"]


def test_raw_prompts_have_no_template_to_fill(engine_folder, capsys):
    assert main(["generate", str(engine_folder), "--prompt", "x", "--raw", "--system", "y"]) == 2
    assert "raw: expected no --system" in capsys.readouterr().err

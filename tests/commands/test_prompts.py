"""Prompts of a file, and what makes requests of them."""

import json

import pytest
import specstep
from specstep.cli import main, parser
from specstep.commands.conversation import with_system
from specstep.commands.prompts import make_requests, read_prompts
from specstep.commands.sampling_options import given_sampling

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}


def entries(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    return read_prompts(str(path))


class Recorder:
    """Takes the place of an engine and writes down what it is asked for."""

    recommended = specstep.SamplingParams(temperature=0.5, top_p=0.9)

    def requests(self, prompt, max_new_tokens, **options):
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
        ({"prompt": "x", "sampling": {"top_p": 0}}, "line 1: sampling: top_p: expected a number above 0"),
        ({"prompt": "x", "sampling": {"max_tokens": 5}}, "line 1: sampling: expected .*the argument max_new_tokens"),
        ({"prompt": "x", "sampling": "hot"}, "line 1: sampling: expected SamplingParams, a mapping"),
        ({"prompt": "x", "sampling": [1]}, "line 1: sampling: expected SamplingParams, a mapping"),
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
        "sampling": None, "forced_acceptance": False, "prediction": None,
    }  # fmt: skip
    assert others["chat_template_kwargs"] == {"tone": "wet", "n": 1}


def given(*arguments):
    """What the options of `generate` say of sampling."""
    return given_sampling(parser().parse_args(["generate", "engine", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "own", "expected"),
    [
        ([], None, None),
        ([], {}, None),
        ([], {"top_k": 5}, {"top_k": 5}),
        ([], "model", {"temperature": 0.5, "top_p": 0.9}),
        (["--sampling", "model"], None, {"temperature": 0.5, "top_p": 0.9}),
        (["--sampling", "model", "--temperature", "2", "--seed", "3"], {"seed": 4, "stop": "x"},
         {"temperature": 2, "top_p": 0.9, "seed": 4, "stop": "x"}),
        (["--temperature", "2", "--min-p", "0.1"], {"temperature": 1, "top_p": None}, {"temperature": 1, "min_p": 0.1}),
        (["--stop", "a", "--stop", "b", "--logit-bias", "5=-1.5", "--logit-bias", "7=2"], None,
         {"stop": ["a", "b"], "logit_bias": {5: -1.5, 7: 2}}),
        (["--top-k", "-1", "--presence-penalty", "-1", "--frequency-penalty", "1", "--repetition-penalty", "1.1",
          "--min-new-tokens", "3", "--n", "2", "--logprobs", "0", "--top-p", "1"], "model",
         {"temperature": 0.5, "presence_penalty": -1, "frequency_penalty": 1, "repetition_penalty": 1.1,
          "min_new_tokens": 3, "n": 2, "logprobs": 0, "top_k": -1}),
    ],
)  # fmt: skip
def test_a_lines_sampling_wins_over_the_options_and_these_over_the_models(arguments, own, expected, tmp_path):
    [entry] = entries(tmp_path, {"prompt": "x", "sampling": own})
    [(_, (_, options))] = make_requests(Recorder(), [entry], 5, chat=False, sampling=given(*arguments))
    assert options["sampling"] == (None if expected is None else specstep.SamplingParams(**expected))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--temperature", "nan"], "temperature: expected 0 or a number from 0.01 to 100, got nan"),
        (["--top-p", "1.5"], "top_p: expected a number above 0 and up to 1, got 1.5"),
        (["--logit-bias", "5"], "logit-bias: expected ID=VALUE, got '5'"),
        (["--logit-bias", "x=1"], "logit_bias: token id: expected an integer of at least 0, got 'x'"),
        (["--logit-bias", "5=nan"], "logit_bias[5]: expected a number from -100 to 100, got nan"),
        (["--stop", ""], "stop[0]: expected a text that is not empty, got ''"),
        (["--n", "0"], "n: expected an integer from 1 to 128, got 0"),
        (["--logprobs", "1"], "logprobs: expected --json beside it, got none"),
    ],
)
def test_wrong_values_are_refused_before_an_engine_is_loaded(arguments, error, capsys):
    assert main(["generate", "no/engine", "--prompt", "x", *arguments]) == 2
    assert capsys.readouterr().err == f"specstep: {error}\n"


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


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}', encoding="utf-8-sig")
    assert [entry.prompt for entry in read_prompts(str(path))] == ["a", "b"]


def test_lines_that_are_nested_too_deep_are_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("[" * 100_000 + '\n{"prompt": "b"}')
    first, second = read_prompts(str(path))
    assert str(first.prompt).startswith("prompts: line 1: expected a JSON object, got maximum recursion depth exceeded")
    assert second.prompt == "b"

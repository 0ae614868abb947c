"""Collecting: answers against transformers, resuming, and what is refused."""

import json
import os
import shutil

import pytest
import torch
from models import greedy, save_model
from specstep.cli import main
from specstep.compile.source import load_source
from specstep.errors import InputError
from specstep.runtime.engine import Engine
from specstep.train.collect import answers, documents, run
from specstep.train.collect.options import CollectOptions
from specstep.train.collect.questions import ask, user_prefix
from specstep.train.data import hidden_states
from specstep.train.data.reader import Data

TINY = {"dtype": "float32", "max_length": 192, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def source(model_folder):
    return load_source(str(model_folder), "float32", "cpu")


def write(path, *lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def sequences(folder):
    return [(tokens.tolist(), prompt) for tokens, prompt in Data(folder).texts()]


def test_prompts_are_answered_and_dialogues_kept(model_folder, engine_folder, source, tmp_path):
    tokenizer = source.tokenizer
    file = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "hello"},
        {"turns": ["one", "two"], "category": "chat"},
        {"prompt": "hi", "response": "yo"},
        {"prompt_token_ids": [5, 6], "token_ids": [7]},
        {"prompt": "hello"},  # asked already
        {"prompt": "x" * 500},  # no room for an answer
    )
    options = CollectOptions(prompts=file, engine=str(engine_folder), **TINY)
    run.collect(str(model_folder), tmp_path / "data", options)
    got = sequences(tmp_path / "data")
    dialogue, asked = tokenizer("<s>user: hi\nbot:yo")["input_ids"], tokenizer("<s>user: hello\nbot:")["input_ids"]
    assert (dialogue, len(dialogue) - 2) in got and ([5, 6, 7], 2) in got and len(got) == 4
    assert (asked + greedy(source.model, asked, 16, [1]), len(asked)) in got


@pytest.mark.parametrize("fast", [True, False])
def test_the_target_runs_in_the_quicker_dtype_and_an_engine_in_bfloat16(model_folder, tmp_path, monkeypatch, fast):
    built = []

    def build(model, folder, *, dtype, **_):
        built.append(dtype)
        raise InputError("that is enough")

    monkeypatch.setattr(hidden_states, "fast_bfloat16", lambda device: fast)
    monkeypatch.setattr(answers, "build", build)
    loaded, real = [], run.load_source
    monkeypatch.setattr(run, "load_source", lambda *given: loaded.append(real(*given)) or loaded[-1])
    file = write(tmp_path / "prompts.jsonl", {"prompt": "hello"})
    with pytest.raises(InputError, match="enough"):
        run.collect(str(model_folder), tmp_path / "data", CollectOptions(prompts=file, **TINY | {"dtype": None}))
    assert built == ["bfloat16"] and loaded[0].model.dtype == (torch.bfloat16 if fast else torch.float32)


def test_an_interrupted_run_goes_on_with_nothing_lost_or_doubled(model_folder, engine_folder, tmp_path, monkeypatch):
    file = write(tmp_path / "prompts.jsonl", *({"prompt": f"question {number}"} for number in range(12)))
    options = CollectOptions(prompts=file, engine=str(engine_folder), hidden_states=True, **TINY)
    monkeypatch.setattr(run, "ROUND", 4)
    run.collect(str(model_folder), tmp_path / "whole", options)
    real, calls = Engine.run, iter(range(100))

    def interrupted(engine, requests):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(engine, requests)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Engine, "run", interrupted)
        run.collect(str(model_folder), tmp_path / "data", options)
    assert len(sequences(tmp_path / "data")) == 8
    run.collect(str(model_folder), tmp_path / "data", options)
    assert sorted(sequences(tmp_path / "data")) == sorted(sequences(tmp_path / "whole"))
    example = Data(tmp_path / "data")[11]
    assert example.hidden.shape == (len(example.tokens), 3 * 48) and example.last.shape[1] == 48


def test_a_model_asks_and_answers_itself(model_folder, tmp_path):
    """A random model's questions are nonsense, but they follow the template, differ, and are the seed's."""
    options = {"temperatures": (1.0,), "seed": 3} | TINY
    for tokens in (1500, 3000):  # the second run goes on
        run.collect(str(model_folder), tmp_path / "a", CollectOptions(tokens=tokens, **options))
        got = sequences(tmp_path / "a")
        assert tokens <= sum(len(text) for text, _ in got) < tokens + 192
    prompts = [tuple(text[:prompt]) for text, prompt in got]
    assert len(set(prompts)) == len(prompts)
    assert all(len(text) > prompt for text, prompt in got)
    run.collect(str(model_folder), tmp_path / "b", CollectOptions(tokens=1500, **options))
    shared = sequences(tmp_path / "b")
    assert shared == got[: len(shared)]


def test_a_model_answers_over_documents(model_folder, engine_folder, source, tmp_path):
    """Orders and questions of its own over texts of many lengths, in their order; a second run adds nothing."""
    texts = [f"{number} " * (1 + 7 * number) for number in range(7)]
    file = write(tmp_path / "documents.jsonl", *({"text": text} for text in texts))
    options = CollectOptions(documents=file, engine=str(engine_folder), **TINY)
    for _ in range(2):
        run.collect(str(model_folder), tmp_path / "data", options)
        got = [source.tokenizer.decode(tokens[:prompt]) for tokens, prompt in sequences(tmp_path / "data")]
        assert len(got) == len(texts)
    assert any(f"Summarize: {texts[0].strip()}" in prompt for prompt in got)
    assert all(sum(text.strip() in prompt for prompt in got) >= 1 for text in texts)


def test_prompts_over_documents_ask_and_order(source, monkeypatch):
    """Each third is a question where the model ended one; an order stands in where it did not."""
    monkeypatch.setattr(documents, "TOGETHER", 2)
    asked = iter([["Who came?", ""]])
    monkeypatch.setattr(documents, "questions", lambda *_: next(asked))
    prompts = list(documents.ask_about(source, "abcdef", seed=0))
    assert prompts[2] == "c\nWho came?" and prompts[5] == documents.ORDERS[4].format("f")
    assert prompts[:2] == [documents.ORDERS[0].format("a"), documents.ORDERS[1].format("b")]
    monkeypatch.undo()
    once, again, other = (list(documents.ask_about(source, "abcdef", seed=seed)) for seed in (1, 1, 2))
    assert once == again and len(other) == 6
    assert list(documents.ask_about(source, [], seed=0)) == []


def test_documents_without_text_are_named(tmp_path):
    for bad in ({"prompt": "hello"}, {"text": 5}, {"text": " "}):
        file = write(tmp_path / "documents.jsonl", {"text": "fine"}, bad)
        with pytest.raises(InputError, match=r'documents.jsonl: line 2: expected "text", a document, got'):
            list(documents.documents_of(file))


def test_questions_follow_the_template(source):
    prefix, stop_ids = user_prefix(source)
    assert prefix == "<s>user: " and stop_ids == [1, source.tokenizer("\n")["input_ids"][0]]
    questions = ask(source, 8, seed=0)
    assert all(len(next(questions)) >= 12 for _ in range(5))


def test_no_template_no_questions(tmp_path, capsys):
    folder = save_model(tmp_path / "model")
    assert main(["collect", str(folder), "-o", str(tmp_path / "data"), "--tokens", "10"]) == 2
    assert "expected an instruction-tuned one with a chat template" in capsys.readouterr().err


def test_the_engine_is_built_once_and_must_be_the_model_s(model_folder, engine_folder, source, tmp_path, monkeypatch):
    built = []

    def build(model, folder, **options):
        built.append(options)
        shutil.copytree(engine_folder, folder)

    monkeypatch.setattr(answers, "build", build)
    for prompt in ("hello", "there"):
        file = write(tmp_path / "prompts.jsonl", {"prompt": prompt})
        run.collect(str(model_folder), tmp_path / "data", CollectOptions(prompts=file, **TINY))
    assert len(built) == 1 and built[0]["max_seq_len"] == 192 and len(sequences(tmp_path / "data")) == 2
    other = save_model(tmp_path / "other", vocab_size=321)
    file = write(tmp_path / "ids.jsonl", {"token_ids": [5]})
    options = {"engine": str(engine_folder)} | TINY
    with pytest.raises(InputError, match="max_seq_len: expected at least the 193 tokens"):
        options_of_more = CollectOptions(prompts=write(tmp_path / "p.jsonl", {"prompt": "new"}), **options)
        run.collect(str(model_folder), tmp_path / "data", with_length(options_of_more, 193))
    with pytest.raises(InputError, match="dtype: expected bfloat16, as asked for, got float32; have another one, or"):
        another = CollectOptions(
            prompts=write(tmp_path / "p.jsonl", {"prompt": "new"}), **options | {"dtype": "bfloat16"}
        )
        run.collect(str(model_folder), tmp_path / "data", another)
    with pytest.raises(InputError, match="model: expected model, as the data there has, got fine"):
        fine = shutil.copytree(model_folder, tmp_path / "fine")
        run.collect(str(fine), tmp_path / "data", CollectOptions(prompts=file, **options))
    other.rename(tmp_path / "model")
    other = tmp_path / "model"
    with pytest.raises(InputError, match="vocab_size: expected 320, as the data there has, got 321"):
        run.collect(str(other), tmp_path / "data", CollectOptions(prompts=file, **options))


def with_length(options, length):
    return CollectOptions(**(vars(options) | {"max_length": length}))


def test_a_full_disk_is_one_line_and_keeps_what_is_finished(model_folder, tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "a.jsonl", {"token_ids": [5, 6]})
    command = ["collect", str(model_folder), "--dtype", "float32", "-o", str(tmp_path / "data"), "--prompts"]
    assert main([*command, file]) == 0

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert main([*command, write(tmp_path / "b.jsonl", {"token_ids": [7]})]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device; 2 tokens in finished shards are kept" in error
    assert sequences(tmp_path / "data") == [([5, 6], 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "tokens: expected at least 1, got 0"),
        (["--temperatures", "-1"], "temperatures: expected 0 to 10, got -1.0"),
        (["--max-length", "4"], "max_length: expected at least 8"),
        (["--prompts", "nowhere.jsonl"], "expected a readable file of JSON lines"),
        (["--documents", "nowhere.jsonl"], "expected a readable file of JSON lines"),
        (["--dtype", "float32", "--max-length", "16"], "max_length: expected at least "),
        (["--documents", "a", "--prompts", "b"], "prompts and documents: expected one of them, got both"),
    ],
)
def test_mistakes_are_named(model_folder, tmp_path, capsys, arguments, message):
    assert main(["collect", str(model_folder), "-o", str(tmp_path / "data"), *arguments]) == 2
    assert message in capsys.readouterr().err

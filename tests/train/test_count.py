"""Counting against collections.Counter, the file it writes, and what it refuses."""

import gzip
import json
import os
from collections import Counter

import pytest
import specstep
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_model, tiny_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file
from specstep.cli import main
from specstep.compile.drafters import ngram_file
from specstep.compile.drafters.ngram_file import load_tables, tokenizer_hash
from specstep.compile.source import load_source
from specstep.kernels.ngram.learned import WAYS, learn_text
from specstep.kernels.ngram.tables import LEVELS, LEVELS_PER_NAT
from specstep.train import count as module
from specstep.train.count import BIGRAM_DISCOUNT, TRIGRAM_DISCOUNT, Counts, make_tables
from specstep.train.data.corpus import Text, read

VOCABULARY = 7
texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), max_size=5)


def plain_counts(sequences):
    """Counter of (previous or -1, last, next) of the tokens after each prompt."""
    counter = Counter()
    for tokens, prompt in sequences:
        whole = [-1, *tokens]
        for place in range(max(prompt, 1), len(tokens)):
            counter[tuple(whole[place - 1 : place + 2])] += 1
    return counter


def counted(sequences):
    counts = Counts(VOCABULARY)
    for tokens, prompt in sequences:
        counts.add(Text(tokens, prompt))
    return counts


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(0, 6), min_size=5, max_size=5), st.sampled_from([1, 10, 1 << 21]))
def test_counts_are_those_of_a_counter(batch, prompts, chunk):
    sequences = [(tokens, min(prompt, len(tokens))) for tokens, prompt in zip(batch, prompts, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        counts = counted(sequences)
    expected = plain_counts(sequences)
    got = {tuple(key): n for *key, n in torch.stack(counts.trigrams(), 1).tolist()}
    assert got == expected and counts.tokens == sum(expected.values())


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(1, 3), st.integers(2, 4))
def test_tables_hold_the_likeliest(batch, min_count, top):
    sequences = [(tokens, 0) for tokens in batch]
    counter, tables = plain_counts(sequences), make_tables(counted(sequences), top, min_count)
    totals, pairs, contexts = Counter(), Counter(), Counter()
    for (previous, last, following), n in counter.items():
        totals[last] += n
        pairs[last, following] += n
        contexts[previous, last] += n
    bigrams = {pair: n / (totals[pair[0]] + BIGRAM_DISCOUNT) for pair, n in pairs.items()}
    assert tables["bigram.tokens"].tolist() == sorted(totals)
    for token, row in zip(tables["bigram.tokens"].tolist(), tables["bigram.entries"], strict=True):
        check_row(row, {after: p for (last, after), p in bigrams.items() if last == token}, top)
    wanted = sorted(context for context, n in contexts.items() if n >= min_count and context[0] >= 0)
    assert [tuple(pair) for pair in tables["trigram.pairs"].tolist()] == wanted
    for context, row in zip(wanted, tables["trigram.entries"], strict=True):
        all_of_it = contexts[context] + TRIGRAM_DISCOUNT
        known = {after: p for (last, after), p in bigrams.items() if last == context[1]}
        best = sorted(known, key=lambda after: -known[after])[:top]
        seen = {after for after in known if (*context, after) in counter}
        if sorted(known.values(), reverse=True)[top - 1 : top + 1].count(min(known[after] for after in best)) == 2:
            continue  # which of the equal ones the bigrams keep is theirs to say
        scores = {t: (counter[(*context, t)] + TRIGRAM_DISCOUNT * known[t]) / all_of_it for t in {*best, *seen}}
        check_row(row, scores, top)


def check_row(row, expected, top):
    got = {int(entry) // LEVELS: int(entry) % LEVELS / LEVELS_PER_NAT for entry in row if entry >= 0}
    assert len(got) == min(top, len(expected))
    best = sorted(expected.values(), reverse=True)[:top]
    assert sorted(got.values()) == pytest.approx([-torch.tensor(p).log().item() for p in best], abs=0.04)
    for token, level in got.items():
        assert level == pytest.approx(-torch.tensor(expected[token]).log().item(), abs=0.04)


def write(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_dialogues_are_rendered_with_the_chat_template(tmp_path):
    file = write(tmp_path / "data.jsonl.gz", {"prompt": "hi", "response": "yo", "temperature": 0.0}, "")
    (text,) = read([file], tiny_tokenizer(), 320)
    whole = tiny_tokenizer()("<s>user: hi\nbot:yo")["input_ids"]
    assert text.tokens == whole and text.prompt == len(whole) - 2


def test_count_then_build_then_generate(model_folder, tmp_path, capsys):
    """The whole way: the engine drafts what the data said, and its output does not change."""
    plain = specstep.eager(str(model_folder), dtype="float32", drafter="none", max_seq_len=128)
    answer = plain.generate("hello", 24, chat=True, ignore_eos=True)
    line = {"prompt_token_ids": answer.prompt_token_ids, "token_ids": answer.token_ids}
    data, output = write(tmp_path / "data.jsonl", line, line, line), tmp_path / "new" / "tables.safetensors"
    assert main(["count", data, "-o", str(output), "--model", str(model_folder)]) == 0
    assert "counted 72 tokens of 3 sequences" in capsys.readouterr().err
    with safe_open(output, "pt") as file:
        about = file.metadata()
    assert about["tokenizer"] == tokenizer_hash(tiny_tokenizer()) and about["tokens"] == "72"
    engine = specstep.eager(str(model_folder), dtype="float32", drafter=str(output), max_seq_len=128)
    drafted = engine.generate("hello", 24, chat=True, ignore_eos=True)
    assert drafted.token_ids == answer.token_ids and drafted.stats["steps"] < 12


def test_default_takes_the_shipped_tables_of_the_same_tokenizer(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ngram_file, "SHIPPED", tmp_path)
    source = load_source(str(model_folder), "float32", "cpu")
    assert ngram_file.shipped_tables(source) is None
    data = write(tmp_path / "data.jsonl", {"token_ids": [3, 4] * 4})
    assert main(["count", data, "-o", str(tmp_path / "a.safetensors")]) == 0
    assert ngram_file.shipped_tables(source) is None
    assert main(["count", data, "-o", str(tmp_path / "b.safetensors"), "--model", str(model_folder)]) == 0
    assert ngram_file.shipped_tables(source) == tmp_path / "b.safetensors"
    assert load_tables(tmp_path / "b.safetensors", source).bigrams.shape[0] == source.model.config.vocab_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected sequences of at least two tokens"),
        ({"token_ids": [5]}, "expected sequences of at least two tokens"),
        ("nonsense", "line 1: expected a JSON object"),
        ([1], "line 1: expected a JSON object"),
        ({"text": "x"}, "line 1: expected"),
        ({"token_ids": [1, 320]}, "line 1: expected token ids from 0 to 319, got 320"),
        ({"token_ids": [1, -1]}, "another tokenizer"),
        ({"token_ids": [1, "a"]}, "got 'a'"),
    ],
)
def test_bad_data_is_named(line, message, model_folder, tmp_path, capsys):
    file = write(tmp_path / "data.jsonl", line)
    assert main(["count", file, "-o", str(tmp_path / "out"), "--model", str(model_folder)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none.jsonl"], "expected a readable file"),
        (["{tmp}/cut.jsonl.gz"], "expected a readable file"),
        (["{tmp}/text.jsonl"], "expected a model with a tokenizer (--model)"),
        (["{tmp}/ids.jsonl", "--top", "0"], "top: expected 1 to 64"),
        (["{tmp}/ids.jsonl", "--min-count", "0"], "min_count: expected"),
        (["{tmp}/ids.jsonl", "-o", "/proc/none/out"], "could not be written"),
    ],
)
def test_mistakes_end_in_one_line(arguments, message, tmp_path, capsys):
    write(tmp_path / "ids.jsonl", {"token_ids": [1, 2, 3]})
    write(tmp_path / "text.jsonl", {"prompt": "a", "response": "b"})
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(1000))[:500])
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(["count", "-o", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--learned-rows", "0"], "learned_rows: expected 1 to 16777216"),
        (["--learned-rows", "-1"], "learned_rows: expected 1 to 16777216"),
        (["--top", "3"], "top, min-count: expected neither beside --learned"),
    ],
)
def test_what_no_learned_table_has_is_refused(given, message, model_folder, tmp_path, capsys):
    file = write(tmp_path / "ids.jsonl", {"token_ids": [1, 2, 3]})
    command = ["count", file, "--learned", "--model", str(model_folder), "-o", str(tmp_path / "out"), *given]
    assert main(command) == 2 and message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_tokens_that_the_model_has_not_are_named(tmp_path, capsys):
    """A tokenizer that knows more tokens than the model."""
    folder = save_model(tmp_path / "model", tokenizer=True, vocab_size=100)
    file = write(tmp_path / "data.jsonl", {"prompt": "hello", "response": "\u00ff"})
    assert main(["count", file, "-o", str(tmp_path / "out"), "--model", str(folder)]) == 2
    assert "line 1: expected token ids from 0 to 99, got" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_tables(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "ids.jsonl", {"token_ids": [1, 2, 3]})
    (tmp_path / "out").write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["count", file, "-o", str(tmp_path / "out")]) == 2
    assert "could not be written: No space left" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "old" and sorted(os.listdir(tmp_path)) == ["ids.jsonl", "out"]


def test_tables_of_another_vocabulary_are_refused(model_folder, tmp_path):
    data = write(tmp_path / "data.jsonl", {"token_ids": [3, 400, 3, 400]})
    assert main(["count", data, "-o", str(tmp_path / "wide")]) == 0
    with pytest.raises(specstep.BuildError, match="below the target's vocabulary of 320, got 400"):
        specstep.eager(str(model_folder), drafter=str(tmp_path / "wide"))
    other = save_model(tmp_path / "other", tokenizer=False)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    data = write(tmp_path / "data.jsonl", {"token_ids": [3, 4, 3, 4]})
    assert main(["count", data, "-o", str(tmp_path / "tables"), "--model", str(other)]) == 0
    with pytest.raises(specstep.BuildError, match=r"expected tables of .* tokenizer, got those of other"):
        specstep.eager(str(model_folder), drafter=str(tmp_path / "tables"))


def test_damaged_tables_are_refused(model_folder, tmp_path):
    source = load_source(str(model_folder), "float32", "cpu")
    data = write(tmp_path / "data.jsonl", {"token_ids": [3, 4, 3, 4, 3, 4, 3, 4]})
    assert main(["count", data, "-o", str(tmp_path / "tables")]) == 0
    good = load_file(tmp_path / "tables")
    for name, tensor in good.items():
        for change in (tensor.float(), torch.cat([tensor, tensor]), tensor * 0 - 700):
            ngram_file.save_tables(tmp_path / "bad", good | {name: change}, {})
            with pytest.raises(specstep.BuildError, match="expected"):
                load_tables(tmp_path / "bad", source)
    (tmp_path / "bad").write_bytes((tmp_path / "tables").read_bytes()[:-8])
    assert not ngram_file.is_ngram_file(str(tmp_path / "bad"))


def test_an_engine_starts_from_what_was_counted(model_folder, tmp_path, capsys):
    """As if it had written it: the same table, in as many steps of eight tokens."""
    file, out = tmp_path / "ids.jsonl", tmp_path / "learned"
    texts = [([5, 6, 7, *range(9, 40)], 3), ([8, 9, 10, 11], 0)]
    lines = [json.dumps({"prompt_token_ids": ids[:cut], "token_ids": ids[cut:]}) for ids, cut in texts]
    file.write_text("\n".join(lines) + "\n")
    count = ["count", str(file), "-o", str(out), "--learned", "--learned-rows", "64"]
    assert main([*count, "--model", str(model_folder)]) == 0
    table = torch.zeros(65, WAYS, dtype=torch.int64)
    for ids, cut in texts:
        for start in range(max(cut, 1), len(ids), 8):
            end = min(start + 8, len(ids))
            learn_text(table, torch.tensor([ids]), torch.tensor([end - 1]), torch.tensor([end - start]), 8)
    assert torch.equal(load_file(out)["learned"], table) and table.any()
    options = {"drafter": "ngram", "dtype": "float32", "max_seq_len": 64, "learned_rows": 64}
    with specstep.eager(str(model_folder), **options) as made:
        started = type(made)(made.session, made.text, learned=out)
        assert (started.session.read_shared()["learned"] == table.numpy()).all()
    capsys.readouterr()
    assert main(count) == 2
    assert "model: expected one beside --learned" in capsys.readouterr().err

"""What is written is read back; an interruption at any moment loses at most one shard; bad data is refused."""

import dataclasses
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer
from safetensors.torch import load_file, save_file
from specstep.compile.drafters.ngram_file import tokenizer_hash
from specstep.errors import InputError
from specstep.train.data.corpus import read
from specstep.train.data.reader import MANIFEST, Data, DataManifest, read_manifest
from specstep.train.data.writer import DataWriter

PLAIN = DataManifest("tiny", vocab_size=50, tokenizer="abc")
HIDDEN = dataclasses.replace(PLAIN, hidden_size=4, hidden_layers=(1, 2))


def sequences(count, hidden=False):
    """Random (tokens, prompt, hidden, last), of lengths 1, 2, 3, ..."""
    draw = torch.Generator().manual_seed(count)
    made = []
    for length in range(1, count + 1):
        tokens = torch.randint(0, 50, (length,), generator=draw, dtype=torch.int32)
        states = [torch.randn(length, size, generator=draw).bfloat16() if hidden else None for size in (8, 4)]
        made.append((tokens, length // 2, *states))
    return made


def write(folder, examples, manifest=PLAIN, shard_tokens=10):
    with DataWriter(folder, manifest, shard_tokens) as writer:
        for example in examples:
            writer.add(*example)
    return folder


def check_equal(data, expected):
    assert len(data) == len(expected)
    for got, (tokens, prompt, hidden, last) in zip(data, expected, strict=True):
        assert torch.equal(got.tokens, tokens) and got.prompt == prompt
        for part, wanted in ((got.hidden, hidden), (got.last, last)):
            assert part is wanted is None or torch.equal(part, wanted)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.booleans(), st.integers(0, 12))
def test_what_is_written_in_two_runs_is_read_back(tmp_path_factory, count, shard_tokens, hidden, first):
    folder, examples = tmp_path_factory.mktemp("data") / "new" / "data", sequences(count, hidden)
    manifest = HIDDEN if hidden else PLAIN
    write(folder, examples[:first], manifest, shard_tokens)
    write(folder, examples[first:], manifest, shard_tokens)
    check_equal(Data(folder), examples)
    assert Data(folder).lengths.tolist() == [len(example[0]) for example in examples]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("call", range(1, 13))
def test_a_kill_at_any_moment_loses_at_most_a_shard_and_doubles_nothing(tmp_path, call):
    """The process dies at its n-th rename or sync: what is on disk is whole, and a later run goes on from it."""
    examples = sequences(6)
    child = os.fork()
    if not child:
        write_and_die(tmp_path, examples, call)
    assert os.waitpid(child, 0)[1] == 0
    done = len(read_manifest(tmp_path).shards) if (tmp_path / MANIFEST).is_file() else 0
    there = list(Data(tmp_path)) if done else []
    check_equal(there, examples[: len(there)])
    assert len(there) == [0, 3][done] and done == max(call - 3, 0) // 6  # each file is a sync, a rename, a sync
    write(tmp_path, examples[len(there) :])
    check_equal(Data(tmp_path), examples)


def write_and_die(folder, examples, call):
    calls = iter(range(1, 1000))

    def dying(real):
        return lambda *arguments: real(*arguments) if next(calls) < call else os._exit(0)

    os.fsync, os.replace = dying(os.fsync), dying(os.replace)
    with DataWriter(folder, PLAIN, 4) as writer:  # three sequences fill the first shard, each other one its own
        for example in examples:
            writer.add(*example)


def test_an_error_in_the_work_loses_nothing_that_was_added(tmp_path):
    examples = sequences(3)
    with pytest.raises(KeyboardInterrupt), DataWriter(tmp_path, PLAIN) as writer:
        for example in examples:
            writer.add(*example)
        raise KeyboardInterrupt
    check_equal(Data(tmp_path), examples)


def test_a_full_disk_keeps_the_finished_shards(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    examples = sequences(4)
    write(tmp_path, examples[:3])
    before = sorted(path.name for path in tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device; 6 tokens in finished shards are kept"):
        write(tmp_path, examples[3:])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    check_equal(Data(tmp_path), examples[:3])


def change_manifest(folder, **changes):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def empty_shard(folder):
    names = ("tokens", "lengths", "prompts")
    save_file({name: torch.zeros(0, dtype=torch.int32) for name in names}, folder / "shard-00000.safetensors")
    size = (folder / "shard-00000.safetensors").stat().st_size
    shard = {"file": "shard-00000.safetensors", "sequences": 0, "tokens": 0, "bytes": size}
    change_manifest(folder, shards=[shard])


def alter(folder, **changes):
    path = folder / "shard-00000.safetensors"
    save_file(load_file(path) | changes, path)


BAD = {
    "data.json, got": lambda folder: (folder / MANIFEST).unlink(),
    "expected a manifest": lambda folder: (folder / MANIFEST).write_text("{"),
    "format_version: expected 1, got 9": lambda folder: change_manifest(folder, format_version=9),
    "at least one finished shard": lambda folder: change_manifest(folder, shards=[]),
    "bytes, got none": lambda folder: (folder / "shard-00001.safetensors").unlink(),
    "bytes, got 100 bytes": lambda folder: os.truncate(folder / "shard-00000.safetensors", 100),
    "empty shard": empty_shard,
    "expected a shard, got": lambda folder: (folder / "shard-00000.safetensors").write_bytes(
        b"\xff" * (folder / "shard-00000.safetensors").stat().st_size
    ),
    "expected ids from 0 to 49, got 50": lambda folder: alter(folder, tokens=torch.full((10,), 50, dtype=torch.int32)),
    "expected a sum of 10 tokens": lambda folder: alter(folder, lengths=torch.ones(4, dtype=torch.int32)),
    "expected tensors of shapes": lambda folder: change_manifest(folder, hidden_size=4, hidden_layers=[0]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_data_is_refused_when_it_is_opened(tmp_path, message):
    write(tmp_path, sequences(5))
    BAD[message](tmp_path)
    with pytest.raises(InputError, match=message):
        Data(tmp_path)


@pytest.mark.parametrize("field, other", [("vocab_size", 51), ("tokenizer", "xyz"), ("hidden_size", 8)])
def test_data_of_another_model_is_refused(tmp_path, field, other):
    write(tmp_path, sequences(2, hidden=True), HIDDEN)
    model = {"vocab_size": 50, "tokenizer": "abc", "hidden_size": 4}
    Data(tmp_path).manifest.check_same("here", **model)
    with pytest.raises(InputError, match=f"here: {field}: expected the model's {other}"):
        Data(tmp_path).manifest.check_same("here", **(model | {field: other}))
    with pytest.raises(InputError, match=f"{field}: expected .*, as the data there has"):
        DataWriter(tmp_path, dataclasses.replace(HIDDEN, **{field: other}))


def test_the_writer_refuses_what_does_not_fit(tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(InputError, match="holds something else"):
        DataWriter(tmp_path / "else", PLAIN)
    with DataWriter(tmp_path / "data", HIDDEN) as writer:
        with pytest.raises(InputError, match="no other writer, got one at work"):
            DataWriter(tmp_path / "data", HIDDEN)
        for tokens, prompt in (([], 0), ([1], 2), ([50], 0), ([-1], 0), ([1], 0)):
            with pytest.raises(InputError, match="expected"):
                writer.add(tokens, prompt)
        with pytest.raises(InputError, match=r"expected shapes .*\[1, 8\].*, got .*\[1, 9\]"):
            writer.add([1], 0, torch.zeros(1, 9), torch.zeros(1, 4))


def test_a_data_directory_is_read_like_a_file(tmp_path):
    tokenizer = tiny_tokenizer()
    manifest = DataManifest("tiny", 320, tokenizer_hash(tokenizer))
    write(tmp_path / "data", [([5, 6, 7], 2), ([8], 0)], manifest)
    assert list(read([str(tmp_path / "data")], tokenizer, 320)) == [([5, 6, 7], 2), ([8], 0)]
    assert len(list(read([str(tmp_path / "data")], None, None))) == 2
    with pytest.raises(InputError, match="vocab_size: expected the model's 321, got 320, of tiny"):
        list(read([str(tmp_path / "data")], tokenizer, 321))

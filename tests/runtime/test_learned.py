"""An engine drafts better with use, says what it said, and keeps what it learned in a file."""

import os
import shutil

import numpy as np
import pytest
import specstep
from safetensors.numpy import load_file, save_file
from specstep.errors import EngineError, InputError
from specstep.runtime.learned import tables

PROMPTS = [[5, 17, 40, 3], [9, 30, 31, 12, 77]]
SAMPLING = [{"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "seed": 4}]
NEW = 100


@pytest.fixture(scope="module", params=["engine_folder", pytest.param("onnx_folder", marks=pytest.mark.slow)])
def folder(request):
    return request.getfixturevalue(request.param)


def ask(engine, **options):
    """Tokens, and steps in all, of two sampled texts."""
    results = engine.generate(PROMPTS, NEW, sampling=SAMPLING, ignore_eos=True, **options)
    return [result.token_ids for result in results], sum(result.stats["steps"] for result in results)


def table(engine):
    return engine.session.read_shared()["learned"]


def test_a_text_that_was_written_before_takes_fewer_steps(folder):
    with specstep.load(folder, nodes="all", learning=False) as engine:
        texts, steps = ask(engine)
        assert ask(engine) == (texts, steps)
        assert not table(engine).any()
    with specstep.load(folder, nodes="all") as engine:
        first, second = ask(engine), ask(engine)
        assert first[0] == second[0] == texts
        assert second[1] < 0.7 * steps
        assert table(engine).any()


def test_a_request_may_keep_what_it_writes_to_itself(folder):
    with specstep.load(folder, nodes="all") as engine:
        ask(engine, learning=False)
        assert not table(engine).any()


def test_all_backends_learn_the_same(engine_folder, onnx_folder, model_folder):
    learned = []
    for make in (
        lambda: specstep.load(engine_folder, nodes="all"),
        lambda: specstep.load(onnx_folder, nodes="all"),
        lambda: specstep.eager(
            str(model_folder), drafter="ngram", dtype="float32", max_batch=2, max_seq_len=192, prefill_chunk=16
        ),
    ):
        with make() as engine:
            for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True):  # alone: rows join as the threads run
                engine.generate(prompt, NEW, sampling=sampling, ignore_eos=True)
            learned.append(table(engine))
    assert (learned[0] == learned[1]).all()
    assert (learned[0] == learned[2]).all()


def test_the_file_is_begun_and_gone_on_with(folder, tmp_path):
    file = tmp_path / "new" / "learned.safetensors"
    with specstep.load(folder, nodes="all", learned=file) as engine:
        texts, steps = ask(engine)
        kept = table(engine)
    assert (load_file(file)["learned"] == kept).all()
    with specstep.load(folder, nodes="all", learned=file) as engine:
        assert (table(engine) == kept).all()
        again, fewer = ask(engine)
        assert again == texts
        assert fewer < 0.7 * steps
    assert (load_file(file)["learned"] != kept).any()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_an_engine_that_does_not_learn_reads_the_file_and_leaves_it(folder, tmp_path):
    file = tmp_path / "learned"
    with specstep.load(folder, nodes="all", learned=file) as engine:
        ask(engine)
    before = file.read_bytes()
    with specstep.load(folder, nodes="all", learned=file, learning=False) as engine:
        assert table(engine).any()
        ask(engine)
    assert file.read_bytes() == before


@pytest.fixture(scope="module")
def good(engine_folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("learned") / "good"
    with specstep.load(engine_folder, nodes="all", learned=file) as engine:
        ask(engine)
    return file


def header(path):
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.metadata()


def rewritten(path, change=lambda values: values, **fields):
    """The same file with another table or header."""
    save_file({"learned": np.ascontiguousarray(change(load_file(path)["learned"]))}, path, header(path) | fields)


def raised(values, place):
    values[place] += 2**20 * 256 * 7
    values[place] += 255 * 256
    return values


DAMAGE = {
    "expected a file of format specstep.learned.1": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "got none: a directory, or a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "format: expected specstep.learned.1, got other.2": lambda path: rewritten(path, format="other.2"),
    "tokenizer: expected": lambda path: rewritten(path, tokenizer="of another model"),
    "vocab_size: expected": lambda path: rewritten(path, vocab_size="7"),
    "expected a table": lambda path: rewritten(path, lambda values: values[:-1]),
    "of int32": lambda path: rewritten(path, lambda values: values.astype(np.int32)),
    "expected token ids below": lambda path: rewritten(path, lambda values: values | -(2**62)),
    "expected an empty last row": lambda path: rewritten(path, lambda values: raised(values, (-1, 0))),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGE)
def test_a_file_that_is_foreign_or_damaged_is_refused(message, good, engine_folder, tmp_path):
    path = tmp_path / "learned"
    shutil.copy(good, path)
    DAMAGE[message](path)
    with pytest.raises(EngineError, match=message):
        specstep.load(engine_folder, nodes="all", learned=path)


def test_an_engine_without_a_table_says_so(model_folder):
    options = {"drafter": "none", "dtype": "float32", "max_seq_len": 64}
    with specstep.eager(str(model_folder), **options) as engine:
        assert tables(engine.spec) == []
    with specstep.eager(str(model_folder), **options | {"drafter": "ngram", "learned_rows": 0}) as engine:
        assert tables(engine.spec) == []
        session, text = engine.session, engine.text
        with pytest.raises(InputError, match="expected an engine that learns"):
            type(engine)(session, text, learned="anything")


def test_a_file_that_cannot_be_written_is_an_error(engine_folder, tmp_path):
    (tmp_path / "file").write_text("")
    engine = specstep.load(engine_folder, nodes="all", learned=tmp_path / "file" / "learned")
    ask(engine)
    with pytest.raises(EngineError, match="could not be written"):
        engine.close()
    engine.close()  # a second time does nothing

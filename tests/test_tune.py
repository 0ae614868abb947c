"""Tuning: the prediction against plain replay, what is kept and when `build` takes it."""

import dataclasses
import json
from collections import Counter

import pytest
import specstep
from models import save_model
from specstep.cli import main
from specstep.compile import tuned
from specstep.compile.config import EngineConfig
from specstep.compile.source import load_source
from specstep.report import AcceptedNode
from specstep.runtime.acceptance import Acceptance
from specstep.train import tune as module
from specstep.train.tune import DEPTH, PLAIN, SIZES, TOP_K, Choice, Measured, interpolate, predict, trees


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(model_folder):
    return load_source(str(model_folder), "float32", "cpu")


def measured(*steps_by_size, paths=((),), step=None, name="a"):
    """What a drafter was measured to do: its step at SIZES, and at the largest the accepted paths."""
    acceptance = Acceptance(1, len(paths), Counter(tuple(AcceptedNode(*node) for node in path) for path in paths))
    results = {Choice(name, size, DEPTH, TOP_K): Measured(acceptance, t) for size, t in zip(SIZES, steps_by_size)}  # noqa: B905
    return results | ({Choice(name, SIZES[-1], DEPTH, TOP_K): Measured(acceptance, step)} if step else {})


BASE = {PLAIN: Measured(Acceptance(1, 1, Counter({(): 1})), 1.0)}


def test_interpolation():
    assert [interpolate({0: 1.0, 4: 3.0, 8: 3.5}, place) for place in (0, 1, 4, 6, 8)] == [1.0, 1.5, 3.0, 3.25, 3.5]


def test_a_drafter_that_is_always_right_at_the_first_choice_gives_a_chain():
    chain = tuple((depth, 0) for depth in range(1, DEPTH + 1))
    choice = predict(BASE | measured(1.1, 1.5, 3.0, paths=[chain]), ["a"])
    assert choice == Choice("a", DEPTH, DEPTH, 1)


def test_nodes_that_are_used_are_paid_for_when_they_are_cheap():
    paths = [((node, node - 1),) for node in range(1, 5)]  # any of the root's four children, each as often
    cheap = predict(BASE | measured(1.0, 1.0, 1.0, paths=paths), ["a"])
    assert (cheap.nodes, cheap.depth, cheap.top_k) == (4, 1, 4)
    dear = predict(BASE | measured(8.0, 9.0, 10.0, paths=paths), ["a"])
    assert dear.nodes == 1


def test_of_two_drafters_the_dearer_must_accept_more():
    path = ((1, 0),)
    first, both = measured(1.1, 1.5, 3.0, paths=[path]), [*([path] * 3), ()]
    assert predict(BASE | first | measured(paths=[path], step=6.0, name="b"), ["a", "b"]).drafter == "a"
    less = measured(1.1, 1.5, 3.0, paths=both)
    assert predict(BASE | less | measured(paths=[path], step=3.0, name="b"), ["a", "b"]).drafter == "b"


def test_every_tree_that_is_judged_can_be_built():
    for choice in trees("ngram"):
        module.DynamicTree(choice.depth, choice.top_k, choice.nodes)


def test_build_takes_what_was_kept_unless_the_user_chooses(source, tmp_path):
    config = EngineConfig(dtype="float32")
    choice = {"drafter": "ngram", "nodes": 3, "depth": 2, "top_k": 2, "tree": "dynamic"}
    lines = []
    assert tuned.with_tuned(source, config, {}, lines.append) == config and not lines
    tuned.save_tuned(source, dataclasses.replace(config, **choice), "ngram, the fastest", [])
    assert tuned.with_tuned(source, config, {}, lines.append) == dataclasses.replace(config, **choice)
    assert lines == ["tuned: ngram, the fastest"]
    for given in ({"drafter": "none"}, {"nodes": 5}, {"tree_choices": "x"}):
        assert tuned.with_tuned(source, config, given, lines.append) == config
    for other in (EngineConfig(), dataclasses.replace(config, max_batch=2)):
        assert tuned.with_tuned(source, other, {}, lines.append) == other
    assert len(lines) == 1


def test_a_choice_that_cannot_be_used_is_left_out(source, tmp_path):
    config, lines = EngineConfig(dtype="float32"), []
    tuned.save_tuned(source, dataclasses.replace(config, drafter=f"default,{tmp_path}/gone"), "", [])
    assert tuned.with_tuned(source, config, {}, lines.append) == config and "gone is gone" in lines[0]
    for broken in ("{", '{"choice": {}}', '{"choice": {"drafter": "x", "tree": "odd", "nodes": 1}}'):
        tuned.tuned_path(source, config).write_text(broken)
        assert tuned.with_tuned(source, config, {}, lines.append) == config
    assert all("cannot be read" in line for line in lines[1:]) and len(lines) == 4


def test_models_are_told_apart(source, drafter_folder, model_folder):
    other = load_source(str(drafter_folder), "float32", "cpu")
    again = load_source(str(model_folder), "float32", "cpu")
    assert tuned.model_hash(source) == tuned.model_hash(again) != tuned.model_hash(other)


def test_command_measures_keeps_and_explains(tmp_path, capsys, monkeypatch):
    """The whole way, with the plain modules in place of compiled engines."""
    model_folder = save_model(tmp_path / "model", tokenizer=True, num_hidden_layers=1)
    built = {}

    def build(model, folder, report, **options):
        folder.mkdir()
        built["options"] = options

    def load(folder, nodes, **_):
        assert nodes == "all"
        return specstep.eager(str(model_folder), **built["options"])

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "load", load)
    monkeypatch.setattr(module, "SIZES", (2, 3, 5))
    monkeypatch.setattr(module, "DEPTH", 2)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello hello hello"}\n{"token_ids": [5, 6, 5, 6]}\n')
    command = ["tune", str(model_folder), "--dtype", "float32", "--max-seq-len", "64", "--max-new-tokens", "6"]
    assert main([*command, "--prompts", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "t.json")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tuned: drafter ") and "tokens/s here" in out and out.count("\n") == 1
    result = json.loads((tmp_path / "t.json").read_text())
    assert {row["drafter"] for row in result["measured"]} == {"none", "ngram"}
    fastest = max(result["measured"], key=lambda row: row["tokens_per_step"] / row["step_of_plain"])
    assert result["choice"] == {name: fastest[name] for name in result["choice"]}
    assert "kept in" in err
    source = load_source(str(model_folder), "float32", "cpu")
    taken = tuned.with_tuned(source, EngineConfig(dtype="float32"), {}, lambda line: None)
    assert {name: getattr(taken, name) for name in result["choice"]} == result["choice"]

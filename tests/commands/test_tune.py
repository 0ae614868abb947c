"""Tuning from end to end: what is kept, when `build` takes it, and the command."""

import dataclasses
import json

import pytest
import specstep
from block_drafters import PUBLISHED, block_tensors, save_block
from models import save_model
from specstep.cli import main
from specstep.compile import tuned
from specstep.compile.config import EngineConfig
from specstep.compile.source import load_source
from specstep.errors import BuildError, InputError
from specstep.train.tune import measure, run
from specstep.train.tune.choose import PLAIN


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(model_folder):
    return load_source(str(model_folder), "float32", "cpu")


def test_build_takes_what_was_kept_unless_the_user_chooses(source):
    config = EngineConfig(dtype="float32")
    choice = {"drafter": "ngram", "nodes": 3, "depth": 2, "top_k": 2, "tree": "dynamic"}
    four = choice | {"nodes": 2, "max_batch": 4, "because": "for four"}
    lines = []
    assert tuned.with_tuned(source, config, {}, lines.append) == config and not lines
    tuned.save_tuned(source, config, [choice | {"max_batch": 1, "because": "ngram, the fastest"}, four], [])
    assert tuned.with_tuned(source, config, {}, lines.append) == dataclasses.replace(config, **choice)
    assert lines == ["tuned: ngram, the fastest"]
    for rows in (2, 4):
        batch = dataclasses.replace(config, max_batch=rows)
        assert tuned.with_tuned(source, batch, {}, lines.append).nodes == 2 and lines[-1] == "tuned: for four"
    lines.clear()
    for given in ({"drafter": "none"}, {"nodes": 5}, {"tree_choices": "x"}):
        assert tuned.with_tuned(source, config, given, lines.append) == config
    assert tuned.with_tuned(source, EngineConfig(), {}, lines.append) == EngineConfig() and not lines
    many = dataclasses.replace(config, max_batch=5)
    assert tuned.with_tuned(source, many, {}, lines.append) == many and "specstep tune --max-batch 5" in lines[0]


def test_a_choice_that_cannot_be_used_is_left_out(source, tmp_path):
    config, lines = EngineConfig(dtype="float32"), []
    choice = dataclasses.asdict(PLAIN) | {"drafter": f"default,{tmp_path}/gone", "max_batch": 1, "because": ""}
    tuned.save_tuned(source, config, [choice], [])
    assert tuned.with_tuned(source, config, {}, lines.append) == config and "gone is gone" in lines[0]
    odd = '{"choices": [{"max_batch": 1, "because": "", "drafter": "x", "tree": "odd", "nodes": 1}]}'
    former = '{"choice": {"drafter": "ngram"}}'
    for broken in ("{", "[]", '{"choices": []}', odd, former):
        tuned.tuned_path(source, config).write_text(broken)
        assert tuned.with_tuned(source, config, {}, lines.append) == config
    assert all("cannot be read" in line for line in lines[1:]) and len(lines) == 6


def test_drafter_auto_is_what_was_tuned_else_what_fits(source):
    config, lines = EngineConfig(dtype="float32", drafter="auto"), []
    given = {"drafter": "auto"}
    assert tuned.with_tuned(source, config, given, lines.append).drafter == "ngram"
    assert lines[0].startswith("drafter auto: ngram")
    choice = {"drafter": "none", "nodes": 0, "depth": 0, "top_k": 1, "tree": None, "max_batch": 1, "because": "none"}
    tuned.save_tuned(source, config, [choice], [])
    assert tuned.with_tuned(source, config, given, lines.append).nodes == 0
    shaped = dataclasses.replace(config, nodes=5)
    assert tuned.with_tuned(source, shaped, given | {"nodes": 5}, lines.append) == dataclasses.replace(
        shaped, drafter="none"
    ), "the user's tree stays"


def test_models_are_told_apart(source, drafter_folder, model_folder):
    other = load_source(str(drafter_folder), "float32", "cpu")
    again = load_source(str(model_folder), "float32", "cpu")
    assert tuned.model_hash(source) == tuned.model_hash(again) != tuned.model_hash(other)


def test_backends_of_fixed_trees_and_no_prompts_are_refused(model_folder):
    with pytest.raises(BuildError, match=r"backend: expected inductor or onnx, .* got tensorrt"):
        run.tune(str(model_folder), backend="tensorrt")
    with pytest.raises(InputError, match="prompts: expected at least one"):
        run.tune(str(model_folder), [])


@pytest.fixture
def uncompiled(tmp_path, monkeypatch):
    """Plain modules in place of compiled engines -> the model, and the options of each build."""
    model_folder = save_model(tmp_path / "model", tokenizer=True, num_hidden_layers=1)
    built = []

    def build(model, folder, progress, **options):
        folder.mkdir()
        built.append(options)

    def load(folder, nodes, **_):
        assert nodes == "all"
        return specstep.eager(str(model_folder), **built[-1])

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "load", load)
    monkeypatch.setattr(measure, "STEPS_S", 0.1)
    return model_folder, built


def test_command_measures_keeps_and_explains(uncompiled, tmp_path, capsys):
    """The whole way. Plain modules cannot be taken apart: plain steps are those of an engine without a drafter."""
    model_folder, built = uncompiled
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello hello hello"}\n{"token_ids": [5, 6, 5, 6]}\n')
    command = ["tune", str(model_folder), "--dtype", "float32", "--max-seq-len", "64", "--max-new-tokens", "6"]
    command += ["--max-batch", "2", "--prompts", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "t.json")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert [options["drafter"] for options in built] == ["ngram", "none"]
    assert "tuned for engines of 1 " in out and "tokens per step with the first n nodes" in out
    assert "drafter ngram: putting it together" in err and "timing steps" in err and "kept in" in err
    result = json.loads((tmp_path / "t.json").read_text())
    assert [at["rows"] for at in result["plain"]] == [choice["max_batch"] for choice in result["choices"]] == [1, 2]
    assert result["drafters"][0]["rungs"][0] == 0 and result["drafters"][0]["built"]
    source = load_source(str(model_folder), "float32", "cpu")
    for choice in result["choices"]:
        config = EngineConfig(dtype="float32", max_batch=choice["max_batch"])
        taken = tuned.with_tuned(source, config, {}, lambda line: None)
        assert {name: getattr(taken, name) for name in tuned.CHOSEN} == {name: choice[name] for name in tuned.CHOSEN}


def test_a_drafter_that_scores_few_levels_is_tuned_at_these(uncompiled, tmp_path, monkeypatch):
    """A block drafter alone, whose blocks say four tokens."""
    model_folder, built = uncompiled
    save_model(model_folder, tokenizer=True)
    config = PUBLISHED["JetSpec"][0]
    head = save_block(tmp_path / "head", config, block_tensors(config))
    monkeypatch.setattr(run, "candidates", lambda source: [])
    options = {"dtype": "float32", "max_seq_len": 64, "max_batch": 1, "max_new_tokens": 6}
    result = run.tune(str(model_folder), ["hello hello"], drafters=[str(head)], **options)
    assert [(options["depth"], options["nodes"]) for options in built] == [(4, 31), (0, 0)]
    assert result["choices"][0]["depth"] <= 4 and result["drafters"][0]["name"] == "head"


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3Moe"])
def test_a_loaded_model_takes_one_drafter_after_the_other(architecture, tmp_path):
    """What a drafter is given does not depend on those that were tried before."""
    folder = save_model(tmp_path, architecture, tokenizer=True)
    source, config = load_source(str(folder), "float32", "cpu"), EngineConfig(dtype="float32", max_seq_len=64)
    first, *others = (
        measure.try_drafter(source, config, name, ["hello hello hello"], 8, lambda line: None) for name in ["ngram"] * 3
    )
    assert first.length > 10 and first.draft_s > 0
    assert [dataclasses.replace(other, draft_s=first.draft_s) for other in others] == [first] * 2

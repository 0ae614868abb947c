"""ONNX engines: the files, and equality with torch and transformers on every integer."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from polygraphy.json import load_json
from sessions import PROMPTS, agree
from specstep.commands.describe import describe
from specstep.compile.assemble import FlatProgram, assemble, example_inputs
from specstep.compile.build import build, make_config
from specstep.compile.check import TOLERANCE, SessionRunner, check_same_step, compare, compared, record
from specstep.compile.differences import within, worst_output
from specstep.compile.export import export_program
from specstep.compile.onnx.lower import FunctionalProgram, check_readers, to_onnx
from specstep.compile.source import load_source
from specstep.controls import TOP_LOGPROBS
from specstep.graphs.drafters.ngram import Ngram
from specstep.report import LEAST_LOGPROB, LOGPROB_STEPS, SCALARS, SCORE_STEPS, Report
from specstep.runtime.engine_file import MANIFEST, NEXT, read_manifest
from specstep.runtime.onnx import OnnxSession

OPTIONS = {"max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}
TREES = {
    "chain": {"tree": "chain", "nodes": 3},
    "static": {"tree": "static", "depth": 2, "top_k": 2, "nodes": 4},
    "dynamic": {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8},
}


def test_engine_equals_inductor_and_transformers(onnx_folder, engine_folder):
    engine = specstep.load(onnx_folder)
    agree([engine, specstep.load(engine_folder)])
    model = tiny_model("Llama")
    results = engine.generate(PROMPTS, 60)  # four prompts through two rows
    assert [result.token_ids for result in results] == [greedy(model, prompt, 60, [1]) for prompt in PROMPTS]
    assert [engine.generate(prompt, 60).token_ids for prompt in PROMPTS] == [result.token_ids for result in results]


def all_agree(engines, rows):
    """Every integer of every step, with one row and with all of them, is the same; every token transformers'."""
    for count in {1, rows}:
        agree(engines, count)
    model = tiny_model("Llama")
    assert [r.token_ids for r in engines[0].generate(PROMPTS, 40)] == [greedy(model, p, 40, [1]) for p in PROMPTS]


@pytest.mark.slow
def test_head_equals_torch_and_transformers(onnx_head_folder, model_folder, head_folder):
    expected = specstep.eager(str(model_folder), drafter=str(head_folder), dtype="float32", **OPTIONS)
    all_agree([specstep.load(onnx_head_folder), expected], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "tree", "batch"),
    [
        ("none", None, 4), ("ngram", None, 4), ("ngram", None, 1), ("model", "dynamic", 4), ("model", "chain", 4),
        ("eagle3", "chain", 4), ("eagle3", "static", 4), ("eagle3", "dynamic", 4), ("eagle3", "dynamic", 1),
        ("ngram,eagle3", "dynamic", 4),
    ],
)  # fmt: skip
def test_engine_equals_inductor_torch_and_transformers(
    drafter, tree, batch, model_folder, drafter_folder, head_folder, tmp_path
):
    name = drafter.replace("eagle3", str(head_folder)).replace("model", str(drafter_folder))
    options = OPTIONS | TREES.get(tree, {}) | {"max_batch": batch, "drafter": name, "dtype": "float32"}
    backends = "onnx", "inductor"
    engines = [specstep.load(build(str(model_folder), tmp_path / b, backend=b, **options)) for b in backends]
    all_agree([*engines, specstep.eager(str(model_folder), **options)], batch)


def test_caches_are_those_of_torch(onnx_folder, model_folder):
    """Every cache and the history change, as in torch: nothing that is written is lost."""
    engine = specstep.load(onnx_folder)
    expected = specstep.eager(str(model_folder), dtype="float32", drafter="ngram", **OPTIONS)
    prompt = PROMPTS[0]
    for session in (engine.session, expected.session):
        session.admit(prompt, 100, [])
    for _ in range(6):
        for session in (engine.session, expected.session):
            session.step()
        length = engine.session.lengths[0]
        assert length == expected.session.lengths[0]
        history = expected.session.state["history"][0, : length + 1].numpy()
        np.testing.assert_array_equal(engine.session.state["history"][0, : length + 1], history)
        for name, cache in expected.session.caches.items():
            got = engine.session.state[name][0, :, :length]
            assert np.abs(got).min(axis=(0, 2)).max() > 0
            np.testing.assert_allclose(got, cache[0, :, :length].numpy(), atol=1e-4, rtol=1e-4)


def test_a_write_in_place_is_refused(model_folder):
    """What the exporter would lose without a word."""

    class Lossy(FunctionalProgram):
        """Hands on its inputs themselves, not copies."""

        def forward(self, *tensors):
            return (
                *FlatProgram.forward(self, *tensors),
                *(t for n, t in zip(self.inputs, tensors, strict=True) if n in self.copied),
            )

    graphs = assemble(load_source(str(model_folder), "float32", "cpu"), make_config({"dtype": "float32", **OPTIONS}))
    lossy = Lossy(graphs.prefill)
    with pytest.raises(AssertionError, match=r"written in place: expected .* got .*keys\.0"):
        export_program(lossy, graphs.spec)
    lossy.written = lossy.copied
    with pytest.raises(AssertionError, match="written in place: expected nothing"):
        to_onnx(export_program(lossy, graphs.spec), lossy)
    inputs = [tensor.clone() for tensor in example_inputs(graphs.spec, graphs.prefill, 64)]
    before = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        FunctionalProgram(graphs.prefill)(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_the_graph_of_a_third_partys_scorer_is_compared(model_folder):
    """At the least sizes, see `export`, though its caches are outputs here."""

    class Foreign(Ngram):
        pass

    options = {"dtype": "float32", **OPTIONS}
    graphs = assemble(load_source(str(model_folder), "float32", "cpu"), make_config(options), Foreign())
    export_program(FunctionalProgram(graphs.prefill), graphs.spec)


def test_a_cache_that_is_not_its_own_output_is_refused(model_folder):
    """A session binds both to the same memory."""
    graphs = assemble(load_source(str(model_folder), "float32", "cpu"), make_config({"dtype": "float32", **OPTIONS}))
    program = FunctionalProgram(graphs.prefill)
    model = to_onnx(export_program(program, graphs.spec), program)
    check_readers(model, program)
    outputs = model.graph.outputs
    one, other = (program.output_names.index(f"{NEXT}keys.{layer}") for layer in (0, 1))
    outputs[one], outputs[other] = outputs[other], outputs[one]
    with pytest.raises(AssertionError, match=r"keys\.0: .* an output that is made of keys\.1"):
        check_readers(model, program)
    outputs[one], outputs[other] = outputs[other], outputs[one]
    cache = next(value for value in model.graph.inputs if value.name == "keys.0")
    model.graph.append(onnx_ir.node("Identity", [cache], name="second"))
    with pytest.raises(AssertionError, match=r"keys\.0: expected one node that reads it, .*second"):
        check_readers(model, program)


def test_files_hold_our_ops_once_and_weights_once(onnx_folder):
    spec = read_manifest(onnx_folder).spec
    # A prefill has no use for what the last layer's attention says, only for its keys and values.
    # The best tokens of each of 7 levels are ranked twice: by their scores, and with the noise to come.
    for program, expected in ((spec.step, {"tree_layout": 1, "tree_attention": 3, "accept": 1, "compact": 6,
                               "choose": 1, "top_log_probs": 1, "rank": 14}),
                              (spec.plain, {"tree_attention": 3, "choose": 1, "top_log_probs": 1}),
                              (spec.prefill, {"tree_attention": 2})):  # fmt: skip
        model = onnx.load(onnx_folder / program.file, load_external_data=False)
        nodes = [node for node in model.graph.node if node.domain == "specstep"]
        assert Counter(node.op_type for node in nodes) == expected
        assert {function.name for function in model.functions} >= set(expected)
        attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
        assert all(a["plugin_namespace"] == b"specstep" and a["plugin_version"] == b"1" for a in attributes)
        assert [value.name for value in model.graph.input] == list(program.inputs)
        assert [value.name for value in model.graph.output] == list(program.outputs)
        assert {NEXT + cache.name for cache in spec.caches} | {NEXT + "history"} <= set(program.outputs)
        places = {t.external_data[0].value for t in model.graph.initializer if t.data_location == t.EXTERNAL}
        assert places == {"weights.safetensors"}
        assert (onnx_folder / program.file).stat().st_size < 400_000
        assert b"/" + b"site-packages" not in model.SerializeToString()
    size = (onnx_folder / "weights.safetensors").stat().st_size
    assert size < 1.05 * sum(p.numel() * 4 for p in tiny_model("Llama").parameters()) + 8192


def polygraphy(*arguments):
    """The command line tool, in a process of its own."""
    command = [sys.executable, "-c", "from polygraphy.tools import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_polygraphy_reads_and_sanitizes(onnx_folder, tmp_path):
    shown = polygraphy("inspect", "model", onnx_folder / "step.onnx")
    assert shown.returncode == 0 and "keys.0" in shown.stdout
    cleaned = tmp_path / "step.onnx"
    done = polygraphy("surgeon", "sanitize", onnx_folder / "step.onnx", "--fold-constants", "-o", cleaned)
    assert done.returncode == 0, done.stdout + done.stderr
    ops = [node.op_type for node in onnx.load(cleaned, load_external_data=False).graph.node]
    assert ops.count("tree_attention") == 3


def test_check_compares_and_saves(onnx_folder, engine_folder, tmp_path, capsys):
    """Engines of two backends beside torch; what is saved is what `polygraphy run` replays."""
    from specstep.cli import main

    assert main(["check", str(onnx_folder), str(engine_folder), "--steps", "3", "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "3 steps: all outputs agree" in printed
    assert f"torch and onnx {onnx_folder}: worst output" in printed and "torch and inductor" in printed
    feeds = load_json(str(tmp_path / "inputs.json"))
    assert [feed["lengths"].shape for feed in feeds] == [(2,), (2,), (1,)]
    saved = ["--load-inputs", tmp_path / "inputs.json", "--load-outputs", tmp_path / "outputs.json"]
    done = polygraphy("run", onnx_folder / "step.onnx", "--onnxrt", *saved, "--atol", "1e-3", "--rtol", "1e-3")
    assert done.returncode == 0 and "PASSED" in done.stdout, done.stdout + done.stderr


def test_check_finds_a_difference(onnx_folder, model_folder, tmp_path):
    other = save_model(tmp_path / "other", tokenizer=True, seed=5)
    result = compare([onnx_folder], model=str(other), steps=2)
    assert not result.agree
    assert result.worst[0].name.startswith((NEXT, "report", "scores"))


def test_check_compares_integers_exactly(onnx_folder, monkeypatch):
    """A token that is off by one, within what floats may be off."""
    replay = OnnxSession.replay

    def off_by_one(session, *size):
        report = replay(session, *size)
        report[0][SCALARS + report[0][SCALARS - 1]] += 1
        return report

    monkeypatch.setattr(OnnxSession, "replay", off_by_one)
    monkeypatch.setitem(TOLERANCE, "float32", 1.0)
    result = compare([onnx_folder], steps=1)
    first_token = SCALARS + read_manifest(onnx_folder).spec.nodes
    assert not result.agree and (result.worst[0].name, result.worst[0].place) == ("report", (0, first_token))


@pytest.mark.parametrize(
    ("expected", "got", "value"),
    [([1.0, 5.0], [1.5, np.nan], 5.0), ([np.nan, 1.0], [1.0, 1.5], np.nan), ([1.0, np.inf], [1.1, -np.inf], np.inf),
     ([np.inf, np.nan, 1.0], [np.inf, np.nan, 1.5], 1.0)],
)  # fmt: skip
def test_worst_output_is_nan_before_all(expected, got, value):
    """Nothing hides behind a NaN or an infinity; equal ones are no difference."""
    worst = worst_output(("a", "b"), [{"x": np.array(expected)}] * 2, [{"x": np.array(got)}] * 2)
    np.testing.assert_equal(worst.expected, value)
    assert worst.name == "x" and worst.step == 0


def step_outputs(asked=True, **changes):
    """What one step of two rows returns: the scores of two drafts, two tokens and none, lengths 5 and 3; the
    log-probabilities of these tokens, if asked for, with others'."""
    lists = [7, 8, 9, 0, 2, 1, 0, 1, 1, *[-6] * 3, *[4 * asked] * 3 * TOP_LOGPROBS]
    lists += [-5 if asked else int(LEAST_LOGPROB * LOGPROB_STEPS)] * 3 * TOP_LOGPROBS
    outputs = {
        "report": np.array([[2, 0, 1, 2, SCORE_STEPS // 2, 7, *lists], [0, 3, 0, 2, SCORE_STEPS // 2, 7, *lists]]),
        "next.lengths": np.array([5, 3]),
        "next.history": np.arange(16).reshape(2, 8),
        "next.keys.0": np.ones((2, 1, 8, 4), np.float32),
        "next.features": np.ones((2, 3, 4), np.float32),
    }
    for name, (place, value) in changes.items():
        outputs[f"next.{name}".replace("next.report", "report").replace("keys", "keys.0")][place] = value
    return outputs


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, []),
        ({"report": ((0, 5), 9)}, []),  # a score, nearly the same
        ({"report": ((0, 5), SCORE_STEPS // 4)}, ["scores"]),
        ({"report": ((0, 7), 9)}, ["report"]),  # the second of two tokens
        ({"report": ((0, 8), 8)}, []),  # a third one, which there is not
        ({"report": ((0, 10), 1)}, ["report"]),  # the node of the accepted token
        ({"report": ((0, 11), 2)}, []),
        ({"report": ((1, 6), 8)}, []),  # the row took no part
        ({"report": ((0, 16), -7)}, ["report"]),  # the second token's log-probability
        ({"report": ((0, 17), -7)}, []),
        ({"report": ((1, 15), -7)}, []),
        ({"report": ((0, 17 + 2 * TOP_LOGPROBS), 9)}, ["report"]),  # the last of the likeliest in its place
        ({"report": ((0, 18 + 2 * TOP_LOGPROBS), 9)}, []),
        ({"report": ((0, 17 + 5 * TOP_LOGPROBS), -9)}, ["report"]),
        ({"report": ((0, 18 + 5 * TOP_LOGPROBS), -9)}, []),
        ({"asked": False, "report": ((0, 15), -7)}, []),
        ({"history": ((0, 5), 9)}, ["next.history"]),  # the root
        ({"history": ((0, 6), 9)}, []),
        ({"keys": ((0, 0, 4, 2), 2.0)}, ["next.keys.0"]),
        ({"keys": ((1, 0, 3, 2), 2.0)}, []),
        ({"keys": ((0, 0, 4, 2), 1.01)}, []),  # rounding
        ({"features": ((1, 2, 3), np.nan)}, ["next.features"]),
        ({"lengths": (0, 6)}, ["next.lengths", "next.history", "next.keys.0"]),
    ],
)
def test_check_compares_what_a_step_decides(changes, differs):
    """All of it, and nothing that a step leaves to chance."""
    expected = step_outputs(changes.get("asked", True))
    same = within(0.1, expected, step_outputs(**changes))
    assert [name for name, equal in same.items() if not equal] == differs
    if differs:
        assert worst_output(("a", "b"), [expected], [step_outputs(**changes)]).name in differs


def test_check_compares_draft_trees_of_float32_alone(model_folder):
    """Close scores, and so the order of nodes, are rounding's in half precision."""
    spec = specstep.eager(str(model_folder), dtype="float32", drafter="ngram", **OPTIONS).spec
    half = dataclasses.replace(spec, config=spec.config | {"dtype": "bfloat16"})
    trees = {f"{NEXT}tree_tokens", f"{NEXT}tree_parents", f"{NEXT}learned"}
    assert set(compared(spec)) - set(compared(half)) == trees and set(compared(half)) < set(compared(spec))


def test_check_takes_a_drafter_wherever_it_was(onnx_folder):
    """Two engines may name one head by two paths."""
    spec = read_manifest(onnx_folder).spec

    def of(drafter):
        return dataclasses.replace(spec, config=spec.config | {"drafter": drafter, "backend": "tensorrt"})

    check_same_step({Path("one"): of("heads/a,ngram"), Path("two"): of("/b/heads/a,ngram")})
    with pytest.raises(specstep.InputError, match="got others in two: drafter differs"):
        check_same_step({Path("one"): of("heads/a,ngram"), Path("two"): of("heads/b,ngram")})


def edited(engine, copy, **config):
    """A copy of an engine whose manifest says other options."""
    folder = shutil.copytree(engine, copy)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["spec"]["config"].update(config)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_check_names_what_is_not_where_it_was(onnx_folder, model_folder, tmp_path):
    """A model, a drafter, a folder to save in."""
    folder = edited(onnx_folder, tmp_path / "copy", drafter="gone")
    with pytest.raises(specstep.InputError, match=r"drafter: expected .* got 'gone' .*name a model or drafter"):
        compare([folder])
    assert compare([folder], drafter="ngram", steps=1).agree
    with pytest.raises(specstep.InputError, match=r"model: .* got 'no/such/model' .*with --model"):
        compare([onnx_folder], model="no/such/model")
    (tmp_path / "file").touch()
    with pytest.raises(specstep.InputError, match=r"save: expected a folder that can be written, got .*file"):
        compare([onnx_folder], save=tmp_path / "file")


def test_check_takes_engines_of_before_an_option(onnx_folder, tmp_path):
    folder = shutil.copytree(onnx_folder, tmp_path / "older")
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["spec"]["config"]["draft_ranks"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert compare([folder, onnx_folder], steps=1).agree


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_check_compares_scores_of_float32_alone(dtype, model_folder):
    engine = specstep.eager(str(model_folder), dtype=dtype, drafter="ngram", **OPTIONS)
    feeds, runner = record(engine, 8), SessionRunner("torch", engine.session, compared(engine.spec))
    reports = [runner.infer_impl(feed)["report"] for feed in feeds]
    assert any(Report.split(report[0]).scores.any() for report in reports) == (dtype == "float32")


def test_check_refuses_engines_of_other_configurations(onnx_folder, tmp_path):
    other = edited(onnx_folder, tmp_path / "other", drafter="none")
    message = f"engine: expected .* of {onnx_folder}, got others in {other}: drafter"
    with pytest.raises(specstep.InputError, match=message):
        compare([onnx_folder, other])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype: expected float32 or float16 for backend onnx, got bfloat16"),
        ({"device": "cuda"}, "device: expected cpu for backend onnx, got cuda"),
    ],
)
def test_what_onnx_runtime_cannot_run_is_refused(options, message, model_folder, tmp_path):
    with pytest.raises(specstep.BuildError, match=message):
        build(str(model_folder), tmp_path / "engine", backend="onnx", **options)


@pytest.mark.slow
def test_values_of_another_size_than_keys(tmp_path):
    model = save_model(tmp_path / "model", "DeepseekV3")
    engine = specstep.load(build(str(model), tmp_path / "engine", backend="onnx", drafter="ngram", **OPTIONS))
    expected = [greedy(tiny_model("DeepseekV3"), prompt, 40, [1]) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 40)] == expected


@pytest.mark.slow
def test_float16_builds_and_runs(model_folder, tmp_path):
    folder = build(str(model_folder), tmp_path / "engine", backend="onnx", dtype="float16", drafter="ngram", **OPTIONS)
    assert len(specstep.load(folder).generate(PROMPTS[0], 8).token_ids) > 0


@pytest.mark.slow
def test_the_shortest_rows(tmp_path):
    """Rows of four tokens, prompts included."""
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    options = {"max_batch": 2, "max_seq_len": 4, "prefill_chunk": 2, "drafter": "ngram"}
    engine = specstep.load(build(str(model), tmp_path / "engine", backend="onnx", **options))
    prompts = [[5], [7, 8], [3, 9, 4]]
    got = [result.token_ids for result in engine.generate(prompts, ignore_eos=True)]
    expected = tiny_model("Llama", num_hidden_layers=1)
    assert got == [greedy(expected, prompt, 4 - len(prompt), []) for prompt in prompts]


HYBRIDS = ["Qwen3_5Text", "Lfm2", "GraniteMoeHybrid", "FalconH1", "Mamba2", "Jamba", "MiniMax", "Rwkv"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_states_of_rows(architecture, tmp_path):
    """Of a hybrid target and of itself as the draft model, in rows that are taken one after the other."""
    fewer = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    fewer = fewer if architecture == "Qwen3_5Text" else {}
    model = str(save_model(tmp_path / "model", architecture, **fewer))
    options = OPTIONS | {"drafter": model, "nodes": 4, "dtype": "float32"}
    folder = build(model, tmp_path / "engine", backend="onnx", **options)
    assert re.search(r"^states +[246] recurrent layers, 0\.\d MiB for 2 rows", describe(read_manifest(folder)), re.M)
    engine, expected = specstep.load(folder, nodes="all"), tiny_model(architecture, **fewer)
    results = engine.generate(PROMPTS, 30, ignore_eos=True)
    assert [result.token_ids for result in results] == [greedy(expected, prompt, 30, []) for prompt in PROMPTS]
    assert sum(result.stats["steps"] for result in results) < 10 * len(PROMPTS), "a perfect drafter is right"

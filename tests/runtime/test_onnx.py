"""Loading and running ONNX engines: without torch, and refused when they do not fit."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import specstep
from sessions import PROMPTS
from specstep.commands.describe import describe
from specstep.runtime import onnx as onnx_session
from specstep.runtime.engine_file import MANIFEST, WEIGHTS, file_entry, read_manifest


def test_an_engine_runs_without_torch(onnx_folder):
    program = """
import sys, specstep
from specstep.cli import main
engine = specstep.load(sys.argv[1])
print(engine.generate([5, 6, 7], 8).token_ids)
main(["generate", sys.argv[1], "--prompt", "abc", "--max-new-tokens", "4", "--stats"])
heavy = {"torch", "transformers", "onnx", "onnxscript", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program, str(onnx_folder)], check=True, stdout=subprocess.DEVNULL)


def test_slots_follow_the_longest_row(onnx_folder):
    """Buffers grow and shrink with the rows, and rows keep what is theirs."""
    engine = specstep.load(onnx_folder)
    session = engine.session
    session.admit([5, 6, 7], 190, [])
    session.step()
    assert session.state["keys.0"].shape[2] == 64
    session.admit(list(range(2, 82)), 190, [])
    session.step()
    assert session.state["keys.0"].shape[2] == 128
    session.release(1)
    session.step()
    assert session.state["keys.0"].shape[2] == 64
    length = session.lengths[0]
    together = session.state["history"][0, 3 : length + 1].tolist()
    assert together == engine_alone(onnx_folder, [5, 6, 7], len(together))
    session.release(0)


def test_reading_fewer_slots_leaves_the_caches(onnx_folder):
    """`read` is a look: a row that is longer than what is read keeps all of its cache."""
    session = specstep.load(onnx_folder).session
    session.admit(list(range(2, 102)), 190, [])
    session.step()
    whole = session.read(1, 128)
    part = session.read(1, 64)
    assert part["keys.0"].shape[2] == 64 and np.array_equal(part["keys.0"], whole["keys.0"][:, :, :64])
    again = session.read(1, 128)
    assert all(np.array_equal(again[name], array) for name, array in whole.items())
    assert np.abs(again["keys.0"][:, :, 64:100]).min(axis=(0, 1, 3)).max() > 0


@pytest.mark.parametrize(("given", "expected"), [("2,1", 2), pytest.param("many", 0, marks=pytest.mark.slow)])
def test_threads_are_those_that_openmp_is_given(given, expected, onnx_folder, monkeypatch):
    seen = []
    real = onnx_session.onnxruntime.InferenceSession

    def session(path, options, **more):
        seen.append(options.intra_op_num_threads)
        return real(path, options, **more)

    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(onnx_session.onnxruntime, "InferenceSession", session)
    specstep.load(onnx_folder)
    assert seen == [expected] * 3


def engine_alone(folder, prompt, count):
    return specstep.load(folder).generate(prompt, count, ignore_eos=True).token_ids


def test_caches_stay_where_they_are(onnx_folder):
    """Nothing is allocated per step: caches are written where they are, two sets of state tensors take turns."""
    session = specstep.load(onnx_folder).session
    session.admit(PROMPTS[0], 100, [])
    caches, lengths = [], []
    for _ in range(4):
        session.step()
        caches.append(session.state["keys.0"].ctypes.data)
        lengths.append(session.state["lengths"].ctypes.data)
    assert len(set(caches)) == 1
    assert lengths[0] == lengths[2] != lengths[1] == lengths[3]


@pytest.fixture
def copy(onnx_folder, tmp_path):
    return shutil.copytree(onnx_folder, tmp_path / "copy")


def edit(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    for name in manifest["files"]:
        manifest["files"][name] = file_entry(folder / name)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def rename(manifest):
    manifest["spec"]["step"]["inputs"][0] = "past"


def reshape(manifest):
    manifest["spec"]["caches"][0]["shape"][3] += 1


def shift(folder, size=None):
    """Move all weights by a blank behind the header."""
    data = (folder / WEIGHTS).read_bytes()
    old = int.from_bytes(data[:8], "little")
    new = (old + 1 if size is None else size).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(new + data[8 : 8 + old] + b" " + data[8 + old :])
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit(f, lambda m: m["spec"]["config"].update(backend="magic")), "backend: expected one of inductor"),
        (lambda f: edit(f, lambda m: m["spec"]["config"].update(backend="inductor")), "engine"),
        (lambda f: edit(f, lambda m: m["requires"].update(providers=["MagicProvider"])), "lacks MagicProvider"),
        (lambda f: edit(f, rename), "step.inputs: expected names of tensors, each once, got 'past'"),
        (lambda f: edit(f, reshape), "keys.0: expected tensor"),
        (lambda f: edit((f / "step.onnx").write_bytes(b"x") and f, lambda m: None), "a model that ONNX Runtime loads"),
        (lambda f: edit(shift(f), lambda m: None), "expected tensors where the models read them, got another header"),
        (lambda f: edit(shift(f, 2**40), lambda m: None), "expected a header of 1 to .* bytes, got 1099511627776"),
        (lambda f: (f / "step.onnx").unlink(), "step.onnx: expected a file of"),
        (lambda f: (f / "step.onnx").write_bytes(b"x"), "expected .* bytes, got 1"),
        (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors: expected a file"),
    ],
)
def test_damaged_engines_are_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(specstep.EngineError, match=message):
        specstep.load(copy)


def test_an_inductor_engine_is_not_taken_for_onnx(engine_folder, tmp_path):
    folder = shutil.copytree(engine_folder, tmp_path / "copy")
    edit(folder, lambda m: (m["spec"]["config"].update(backend="onnx"), m.update(requires={})))
    with pytest.raises(specstep.EngineError, match=r"(step|prefill)\.pt2: expected a model that ONNX"):
        specstep.load(folder)


def test_a_missing_package_is_named(onnx_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, "specstep.runtime.onnx", raising=False)
    with pytest.raises(specstep.EngineError, match=r"onnxruntime, which is not installed; run `pip install"):
        specstep.load(onnx_folder)


def test_a_missing_provider_is_named(onnx_folder, monkeypatch):
    monkeypatch.setattr(onnx_session, "machine", lambda: {"providers": []})
    with pytest.raises(specstep.EngineError, match="lacks CPUExecutionProvider"):
        specstep.load(onnx_folder)


def test_inspect_lists_inputs_and_outputs(onnx_folder):
    page = describe(read_manifest(onnx_folder))
    for line in ("model step.onnx, opset 18", "keys.0", "next.values.2", "['rows', 2, 'slots', 12]", "onnxscript"):
        assert line in page


def test_rows_do_not_see_each_other(onnx_folder):
    engine = specstep.load(onnx_folder)
    alone = [engine.generate(prompt, 20, ignore_eos=True).token_ids for prompt in PROMPTS]
    assert [r.token_ids for r in engine.generate(PROMPTS, 20, ignore_eos=True)] == alone
    assert all(np.isfinite(engine.session.state[f"keys.{layer}"]).all() for layer in range(3))

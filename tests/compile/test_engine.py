"""The serialized engine: equal to the eager step, whole or not there, and refused when it does not fit."""

import dataclasses
import json
import logging
import os
import re
import shutil
import subprocess
import sys

import pytest
import specstep
import torch
from models import greedy, save_eagle3, save_model, tiny_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from sessions import PROMPTS, agree
from specstep.commands.describe import describe
from specstep.compile.build import build
from specstep.compile.inductor import compilers, programs
from specstep.compile.inductor.lower import instruction_flags
from specstep.errors import BuildError
from specstep.kernels.native import INSTRUCTION_SETS, CompilerError, detect_instruction_set
from specstep.runtime.engine_file import FORMAT_VERSION, MANIFEST, read_manifest
from torch.torch_version import TorchVersion

OPTIONS = {"dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}


def test_eager_and_engine_agree_on_every_integer(model_folder, engine_folder):
    agree([specstep.eager(str(model_folder), drafter="ngram", **OPTIONS), specstep.load(engine_folder)])


@pytest.mark.slow
def test_eager_and_jit_agree_on_every_integer(tmp_path):
    """On one layer and a small tree: what is compiled is the same over again for each."""
    folder, tree = save_model(tmp_path / "model", num_hidden_layers=1), {"depth": 2, "top_k": 2, "nodes": 3}
    agree([make(str(folder), drafter="ngram", **tree, **OPTIONS) for make in (specstep.eager, specstep.jit)])


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        pytest.param("model", {"tree": "static", "depth": 3, "top_k": 2, "nodes": 6}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8}, marks=pytest.mark.slow),
    ],
)  # the slow tests of tests/compile/onnx/test_lower.py have each drafter with each kind of tree
def test_eager_and_engine_agree_for_neural_drafters(drafter, tree, model_folder, drafter_folder, tmp_path):
    name = str(drafter_folder) if drafter == "model" else str(save_eagle3(tmp_path / "head"))
    folder = build(str(model_folder), tmp_path / "engine", drafter=name, **tree, **OPTIONS)
    agree([specstep.eager(str(model_folder), drafter=name, **tree, **OPTIONS), specstep.load(folder)])


def test_engine_equals_transformers_row_by_row(engine_folder):
    engine, model = specstep.load(engine_folder), tiny_model("Llama")
    results = engine.generate(PROMPTS, 60)  # four prompts through two rows
    assert [result.token_ids for result in results] == [greedy(model, prompt, 60, [1]) for prompt in PROMPTS]
    alone = [engine.generate(prompt, 60).token_ids for prompt in PROMPTS]
    assert alone == [result.token_ids for result in results]


def test_weights_are_written_once(engine_folder):
    """Both programs name the same tensors of one file (that memory holds them once: tests/test_default_engine.py)."""
    spec = specstep.load(engine_folder).spec
    assert set(spec.prefill.constants.items()) & set(spec.step.constants.items())
    stored = (engine_folder / "weights.safetensors").stat().st_size
    # Keys and values of 24 columns are padded to 32.
    assert stored < 1.04 * sum(p.numel() * 4 for p in tiny_model("Llama").parameters()) + 4096


def test_capacity_ends_a_row_with_length(engine_folder):
    engine = specstep.load(engine_folder)
    prompt = list(range(2, 102))
    result = engine.generate(prompt, ignore_eos=True)
    assert result.finish_reason == "length" and len(result.token_ids) == 192 - 100
    full = engine.generate((prompt * 2)[:191], ignore_eos=True)
    assert full.finish_reason == "length" and len(full.token_ids) == 1
    assert result.token_ids == greedy(tiny_model("Llama"), prompt, 92)


@pytest.fixture
def copy(engine_folder, tmp_path):
    return shutil.copytree(engine_folder, tmp_path / "copy")


def edit(folder, change):
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / MANIFEST).unlink(), "expected a directory with manifest.json"),
        (lambda f: (f / MANIFEST).write_text("{"), "does not parse"),
        (lambda f: (f / MANIFEST).write_text("[]"), "does not parse"),
        (
            lambda f: edit(f, lambda m: m.update(format_version=99)),
            f"format_version: expected {FORMAT_VERSION}, got 99",
        ),
        (lambda f: edit(f, lambda m: m["spec"].pop("caches")), "manifest.spec: expected the field caches, got none"),
        (
            lambda f: edit(f, lambda m: m["about"]["tools"].update(name="xml")),
            "tool-format: expected one of .* got xml",
        ),
        (lambda f: edit(f, lambda m: m["requires"].update(torch="1.0.0")), "torch: expected 1.0.0, got 2"),
        (lambda f: edit(f, lambda m: m["requires"].update(architecture="riscv")), "architecture: expected riscv"),
        (lambda f: edit(f, lambda m: m["requires"].update(instructions=["avx9000"])), "this machine lacks avx9000"),
        (lambda f: (f / "step.pt2").unlink(), "step.pt2: expected a file of"),
        (
            lambda f: (f / "step.pt2").write_bytes((f / "step.pt2").read_bytes()[:-9]),
            "step.pt2: expected .* bytes, got",
        ),
        (lambda f: flip(f / "step.pt2"), "the file was altered"),
        (lambda f: flip(f / "tokenizer.json"), "the file was altered"),
        (lambda f: (f / "weights.safetensors").unlink(), "weights.safetensors: expected a file"),
        (lambda f: flip(f / "weights.safetensors", at=3), "expected a safetensors file"),
        (
            lambda f: edit(f, lambda m: m["spec"]["step"]["constants"].popitem()),
            "constants: expected those of the manifest",
        ),
        (
            lambda f: edit(f, lambda m: m["spec"]["step"]["constants"].update({"x" * 9000: "y"})),
            r"constants: expected those of the manifest, got a difference in \['x{298}; build",
        ),
    ],
)
def test_damaged_engines_are_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(specstep.EngineError, match=message):
        specstep.load(copy)


def flip(path, at=200):
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(bytes(data))


def test_altered_weights_are_found_by_a_deep_check(copy):
    flip(copy / "weights.safetensors", at=-5)
    with pytest.raises(specstep.EngineError, match="the file was altered"):
        specstep.load(copy, deep_check=True)


EXPECTED = [OSError(28, "No space left on device"), SafetensorError("No space left"), CompilerError("install g++")]


@pytest.mark.parametrize("error", [*EXPECTED, KeyboardInterrupt(), RuntimeError("a defect")])
def test_a_failed_build_leaves_nothing(error, model_folder, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(programs, "compile_programs", fail)
    expected = specstep.BuildError if error in EXPECTED else type(error)
    with pytest.raises(expected, match=r"No space left|install g\+\+" if error in EXPECTED else ""):
        build(str(model_folder), tmp_path / "engine", dtype="float32", max_seq_len=64, drafter="none")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_things_is_not_replaced(model_folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(specstep.BuildError, match="holds something else"):
        build(str(model_folder), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype: expected one of bfloat16"),
        ({"device": "tpu"}, "device: expected cpu or cuda for backend inductor, got tpu"),
        ({"backend": "mlir"}, "backend: expected one of"),
        ({"nodes": -1}, "nodes: expected 0 to 256, got -1"),
        ({"max_batch": 0}, "max_batch: expected"),
        ({"max_seq_len": 1}, "max_seq_len: expected at least"),
        ({"drafter": "magic"}, "drafter: expected none, ngram, mtp, early-exit:N, default, auto, a path"),
        (
            {"drafter": "ngram,none"},
            "drafter: expected none by itself, .*, 'ngram,none'; remove it to mix",
        ),
        ({"drafter": "none,default"}, "drafter: expected none by itself, .*, 'none,default'"),
        ({"colour": "red"}, "options: expected some of"),
        ({"tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 99}, "nodes: expected between"),
        ({"tree": "chain", "nodes": 3, "depth": 2}, "chain: expected depth 3"),
    ],
)
def test_bad_options_are_refused(options, message, model_folder, tmp_path):
    with pytest.raises(specstep.BuildError, match=message):
        build(str(model_folder), tmp_path / "engine", **options)
    assert list(tmp_path.iterdir()) == []


def without(model, folder, part):
    """A copy of a model that lacks the weights of such a name."""
    shutil.copytree(model, folder)
    kept = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if part not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_bad_models_are_refused(tmp_path, model_folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_text("x")
    broken = shutil.copytree(model_folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    for name, message in (
        (tmp_path / "nowhere", "expected a model directory"),
        (tmp_path / "empty", "expected a directory with config.json"),
        (tmp_path / "file.bin", "expected a model directory"),
        (broken, "expected a causal language model"),
        (
            without(model_folder, tmp_path / "cut", "lm_head.weight"),
            "expected all weights, got none for lm_head.weight$",
        ),
        (without(model_folder, tmp_path / "half", "mlp"), "got none for .*mlp.* and 6 more$"),
    ):
        with pytest.raises(specstep.BuildError, match=message):
            build(str(name), tmp_path / "engine")


def test_drafter_with_another_vocabulary_is_refused(tmp_path):
    plain = save_model(tmp_path / "plain")
    other = save_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(specstep.BuildError, match=r"expected a vocabulary of 320, as .*, got 300; to have"):
        specstep.eager(str(plain), drafter=str(other), dtype="float32")


@pytest.mark.skipif(detect_instruction_set() == "portable", reason="the trial is Inductor's there")
def test_vector_instructions_are_those_that_a_trial_finds():
    """Without the trial, which compiles torch's headers for each set of them."""
    program = """if True:
        from specstep.compile.inductor.compilers import vector_instructions
        from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa, valid_vec_isa_list
        tried, build = [], VecISA.check_build
        VecISA.check_build = lambda isa, code: tried.append(code) or build(isa, code)
        known, trials = vector_instructions(), tried.count(VecISA._avx_code)
        valid_vec_isa_list.cache_clear()
        print(known == str(pick_vec_isa()) != "INVALID_VEC_ISA", trials, tried.count(VecISA._avx_code) > 0)
    """
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=path, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0", "True"], done.stderr


def test_a_machine_with_cuda_and_no_gpu_is_no_word_to_a_user(caplog):
    log = logging.getLogger("torch.utils.cpp_extension")
    log.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
    log.warning("another")
    assert [record.message for record in caplog.records] == ["another"]


@pytest.mark.parametrize("version", ["2.11.0+cpu", "2.12.1"])
def test_a_torch_whose_steps_accept_no_drafts_is_refused(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(BuildError, match=rf"torch: expected 2\.13 or later .* for a CPU, got {re.escape(version)}"):
        compilers.check_torch("cpu")
    compilers.check_torch("cuda")


def test_inspect_marks_an_engine_that_accepts_anything(engine_folder):
    manifest = read_manifest(engine_folder)
    forced = dataclasses.replace(manifest.spec, config=manifest.spec.config | {"forced_acceptance": 2})
    assert "accepts 2 drafts per step whatever" in describe(dataclasses.replace(manifest, spec=forced))
    assert "FORCED" not in describe(manifest)


def test_an_engine_needs_the_instructions_that_its_library_was_compiled_with() -> None:
    for name, flags in INSTRUCTION_SETS.items():
        needed = {flag.removeprefix("-m").replace("avx512bf16", "avx512_bf16").replace("avx512vnni", "avx512_vnni")
                  for flag in flags}  # fmt: skip
        assert instruction_flags([name]) == needed

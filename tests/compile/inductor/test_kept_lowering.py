"""A lowering that is kept gives other weights what a trace of them would."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from models import save_model
from quantized_files import CASES as FILES
from quantized_files import save_quantized
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.inductor import kept_lowering
from specstep.compile.inductor.compiled import Compiled
from specstep.compile.inductor.kept_code import keep_bytes, keep_program, kept_bytes
from specstep.compile.inductor.kept_lowering import find_lowering, keep_lowering, lowering_key
from specstep.compile.inductor.programs import _constants
from specstep.compile.inductor.rewrites import rewrite_for_cpu
from specstep.compile.source import load_source

pytestmark = pytest.mark.usefixtures("own_cache")
OPTIONS = {"drafter": "ngram", "max_seq_len": 128, "prefill_chunk": 16, "nodes": 5}
KEYS = {"prefill": "a" * 64, "step": "b" * 64, "plain": "c" * 64}


def assembled(folder, **changes):
    config = make_config(OPTIONS | changes)
    return assemble(load_source(str(folder), config.dtype, "cpu"), config)


def traced(graphs):
    """What a build makes of graphs, all but the packages."""
    exported = {name: export_program(program, graphs.spec) for name, program in graphs.programs.items()}
    packed = rewrite_for_cpu(exported.values(), graphs.precision)
    names = {name: [spec.target for spec in program.graph_signature.input_specs if spec.target is not None]
             for name, program in exported.items()}  # fmt: skip
    keys = {name: KEYS[name] for name in exported}
    return Compiled(_constants(exported, names), packed, {"draft": {"nodes": 1}}, ["a reason"], {"op": 2}, keys)


def kept(graphs, tmp_path):
    for name in graphs.programs:
        (tmp_path / name).write_bytes(name.encode())
        keep_program(KEYS[name], tmp_path / name)
    compiled = traced(graphs)
    keep_lowering("key", graphs, compiled)
    return compiled


def assert_same(one, other):
    assert {name: [*held] for name, held in one.constants.items()} == {
        name: [*held] for name, held in other.constants.items()
    }
    for program, held in one.constants.items():
        for name, tensor in held.items():
            there = other.constants[program][name]
            assert torch.equal(tensor, there) and tensor.dtype == there.dtype, f"{program} {name}"
    assert [weight[:2] for weight in one.packed] == [weight[:2] for weight in other.packed]
    fields = ("stages", "inexact", "operators", "keys")
    assert [getattr(one, field) for field in fields] == [getattr(other, field) for field in fields]


CASES: dict[str, dict[str, object]] = {
    "Llama": {"max_batch": 3},
    "Qwen2": {"weights": "int8"},
    "GPT2": {"weights": "int4"},
    "Qwen3Moe": {"dtype": "float32"},
    "Phi3": {},
}


@pytest.mark.parametrize(
    "architecture", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "Llama")]
)
def test_other_weights_become_what_their_own_trace_makes_of_them(architecture, tmp_path):
    first, second = (
        assembled(save_model(tmp_path / str(seed), architecture, seed=seed), **CASES[architecture]) for seed in (0, 1)
    )
    assert lowering_key(first, {}) == lowering_key(second, {}) is not None
    before = kept(first, tmp_path)
    found = find_lowering("key", second, tmp_path)
    assert found is not None and all(
        (tmp_path / f"{name}.pt2").read_bytes() == name.encode() for name in second.programs
    )
    assert_same(found, traced(second))
    assert any(not torch.equal(tensor, found.constants["step"][name])
               for name, tensor in before.constants["step"].items())  # fmt: skip


@pytest.mark.parametrize("file", [pytest.param("awq", marks=pytest.mark.slow), "gptq"])
def test_groups_of_a_file_stay_what_they_are(file, tmp_path):
    """They are found by their values."""
    config, write, kind = FILES[file]
    for seed in (0, 1):
        save_quantized(tmp_path / str(seed), config, write, seed)
    first, second = (assembled(tmp_path / str(seed)) for seed in (0, 1))
    kept(first, tmp_path)
    found = find_lowering("key", second, tmp_path)
    assert kind in {weight.kind for weight in found.packed}
    assert_same(found, traced(second))


def test_weights_of_another_kind_are_traced(tmp_path):
    first = assembled(save_model(tmp_path / "model"))
    kept(first, tmp_path)
    assert find_lowering("key", first, tmp_path) is not None
    other = assembled(tmp_path / "model", weights="int8")
    assert find_lowering("key", other, tmp_path) is None
    assert lowering_key(first, {}) != lowering_key(other, {})


def test_one_that_is_found_needs_no_compiler():
    """It is 1.4 seconds of imports."""
    program = (
        "import sys; import specstep.compile.build, specstep.compile.inductor.lower as lower\n"
        "there = lambda: 'torch._inductor.compile_fx' in sys.modules\n"
        "print(there()); lower._programs(); print(there())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_one_that_is_not_whole_is_traced(tmp_path):
    graphs = assembled(save_model(tmp_path / "model"))
    assert find_lowering("key", graphs, tmp_path) is None
    kept(graphs, tmp_path)
    whole = kept_bytes("key", kept_lowering.SUFFIX)
    record = json.loads(whole.partition(b"\0")[0])
    keep_bytes("key", kept_lowering.SUFFIX, json.dumps(record | {"keys": record["keys"] | {"step": "d" * 64}}).encode())
    assert find_lowering("key", graphs, tmp_path) is None  # its program has gone
    keep_bytes("key", kept_lowering.SUFFIX, whole)
    assert find_lowering("key", graphs, tmp_path) is not None


def test_what_the_layout_says_is_in_the_key(tmp_path):
    folder = save_model(tmp_path / "model")
    graphs = assembled(folder)
    keys = [lowering_key(graphs, {})]
    for changes in ({"nodes": 4}, {"max_batch": 2}, {"drafter": "none"}, {"kv_cache": "int8"}, {"sum_parts": 2},
                    {"tree": "chain"}):  # fmt: skip
        keys.append(lowering_key(assembled(folder, **changes), {}))
    keys.append(lowering_key(graphs, {"a setting": 1}))
    assert len({*keys}) == len(keys) and None not in keys


def test_what_cannot_be_known_has_no_key(tmp_path):
    graphs = assembled(save_model(tmp_path / "model"))
    assert lowering_key(dataclasses.replace(graphs, others=({},)), {}) is None
    graphs.step.module.held = iter(())
    assert lowering_key(graphs, {}) is None


def test_weights_from_elsewhere_are_not_kept(tmp_path, monkeypatch):
    graphs = assembled(save_model(tmp_path / "model"))
    monkeypatch.setattr(kept_lowering, "MOST_HELD", 100)
    compiled = traced(graphs)
    compiled.constants["step"]["of code"] = torch.zeros(26)
    keep_lowering("key", graphs, compiled)
    assert kept_bytes("key", kept_lowering.SUFFIX) is None
    compiled.constants["step"]["of code"] = torch.arange(25.0)
    kept_programs = {name: tmp_path / name for name in graphs.programs}
    for name, path in kept_programs.items():
        path.write_bytes(b"program")
        keep_program(KEYS[name], path)
    keep_lowering("key", graphs, compiled)
    assert torch.equal(find_lowering("key", graphs, tmp_path).constants["step"]["of code"], torch.arange(25.0))


def test_a_name_of_two_tensors_is_no_name(tmp_path):
    graphs = assembled(save_model(tmp_path / "model"))
    names = kept_lowering._stored(graphs.programs)
    for number, program in enumerate(graphs.programs.values()):
        program.module.register_buffer("one", torch.full((2,), number))
    assert kept_lowering._stored(graphs.programs).keys() == names.keys()


def test_a_few_values_are_part_of_the_key(tmp_path):
    """The compiler may have written them into the code."""
    first, second = (assembled(save_model(tmp_path / str(seed), "GptOss", seed=seed)) for seed in (0, 1))
    assert lowering_key(first, {}) != lowering_key(second, {})  # sinks, one for each of a few heads

"""What `profile` says of a step: nothing is left out, nothing is counted twice, and the engine is as before."""

import os
import re
import sys
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import specstep
import torch
from safetensors.torch import load_file
from specstep.errors import EngineError
from specstep.kernels.native_ops import NATIVE_OPS
from specstep.kernels.recording import RecordedCall, can_record, record
from specstep.runtime.inductor import profile as measure
from specstep.runtime.inductor.openmp import release_threads
from specstep.runtime.inductor.step_parts import COMPILED, HOST, step_parts, weight_bytes

LAYERS, KEY_HEADS, HEAD, NODES = 3, 2, 12, 8  # of `engine_folder`, in float32
TOKENS, ROWS = 20, 2


@pytest.fixture(scope="module")
def engine(engine_folder):
    with specstep.load(engine_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def profile(engine):
    before = engine.generate([5, 6, 7], 12).token_ids
    profile = measure.profile(engine.session, TOKENS, ROWS, NODES, steps=4)
    assert engine.generate([5, 6, 7], 12).token_ids == before and engine.session.free_rows == ROWS
    return profile


def test_steps_verify_the_nodes_that_are_asked_for(engine, monkeypatch):
    real, verified = engine.session.step, set()
    monkeypatch.setattr(engine.session, "step", lambda nodes: (verified.add(nodes), real(nodes))[1])
    measure.profile(engine.session, TOKENS, 1, 3, steps=1)
    assert verified == {3}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_is_put_back_leaves_no_thread_that_spins():
    """On a core that the step needs."""

    class Session:
        state, shared, lengths = {"large": torch.zeros(2**20)}, {}, [1]

        def step(self, nodes):
            seen.append(len(os.listdir("/proc/self/task")))

    seen = []

    def run():
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        repeated = measure._Repeated(Session(), 0)
        release_threads()
        seen.append(len(os.listdir("/proc/self/task")))
        repeated()
        torch.set_num_threads(before)

    with ThreadPoolExecutor(1) as pool:  # OpenMP's helpers are those of a thread
        pool.submit(run).result()
    assert seen[0] == seen[1]


def test_parts_add_up_to_the_step(profile):
    assert (profile.tokens, profile.rows) == (TOKENS, ROWS) and profile.slots == 64
    assert sum(part.seconds for part in profile.parts) == pytest.approx(profile.recorded_s)
    assert all(part.seconds >= 0 for part in profile.parts)
    assert sum(part.seconds for part in profile.parts if part.op not in (COMPILED, HOST)) < profile.recorded_s
    assert sum(profile.stages().values()) == pytest.approx(profile.recorded_s)
    assert all(profile.stages().values())


@pytest.fixture(scope="module")
def written(engine_folder):
    """Calls of the step that AOTInductor wrote, in order: the op, and the program's names of what it is given. It keeps
    the code beside what it compiled; a layer is a function, which a loop calls with what its op is given."""
    with zipfile.ZipFile(engine_folder / "step.pt2") as package:
        name = next(name for name in package.namelist() if name.endswith(".wrapper.cpp"))
        program, layers = package.read(name).decode().split("::run_impl(", 1)[1].split("// AOTInductorModel::run_impl")
    bodies = re.split(r"^static void (layer_\d+)\(", layers, flags=re.M)[1:]
    functions = dict(zip(bodies[::2], map(_calls, bodies[1::2]), strict=True))
    assert functions, "the layers of this engine are alike"
    calls = []
    for op, given in _calls(program):
        layer, _, loop = op.partition("_loop_")
        for turn in range(max(len(x) for x in given if isinstance(x, list)) if loop else 1):
            own = [x[turn] if isinstance(x, list) else x for x in given]
            names = {f"arg{index}_1": name for index, name in enumerate(own)}
            inner = functions.get(layer, [])
            calls += [(op, [names.get(name, name) for name in given]) for op, given in inner] or [(op, own)]
    return calls


def _calls(code: str) -> list[tuple[str, list]]:
    """What is given as a list stays one."""
    found = re.findall(r"CHECK\(aoti_torch_cpu_(\w+)\((.*)\)\);", code)
    lists = re.compile(r"std::array<AtenTensorHandle, \d+>{([^}]*)}\.\w+\(\), \d+")
    return [
        (op, [x.split("|") if "|" in x else x for x in lists.sub(lambda x: x[1].replace(", ", "|"), given).split(", ")])
        for op, given in found
        if op in NATIVE_OPS or op.startswith("layer_")
    ]


def test_every_call_of_the_compiled_graph_is_told(profile, written):
    expected = Counter(op.removesuffix("_native") for op, _ in written)
    told = Counter()
    for part in profile.parts:
        if part.op not in (COMPILED, HOST):
            told[part.op.removesuffix("_native")] += part.calls
    assert told == expected and told["tree_attention"] == LAYERS


def test_attention_reads_the_caches_where_they_lie(written):
    """Keys and values are the program's own inputs, not copies of them."""
    caches = [given[1:3] for op, given in written if op == "tree_attention_native"]
    assert len(caches) == LAYERS and all(cache.startswith("arg") for pair in caches for cache in pair)
    assert len({cache for pair in caches for cache in pair}) == 2 * LAYERS


def test_bytes_are_those_of_weights_and_of_the_tokens_in_the_cache(profile, engine_folder):
    read = {(part.stage, part.op, part.place): part.read for part in profile.parts}
    element, attended = 4, ROWS * (TOKENS + NODES)
    assert read["verify", "tree_attention", ""] == LAYERS * KEY_HEADS * attended * 2 * HEAD * element
    packed = {
        name: tensor.nbytes
        for name, tensor in load_file(engine_folder / "weights.safetensors").items()
        if name.endswith("_packed")
    }
    for place in ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.o_proj"):
        whole = sum(size for name, size in packed.items() if f".{place}." in name)
        assert read["verify", "packed_linear", place] == whole > 0
    assert read["draft", "ngram", ""] is None
    assert profile.weights == sum(packed.values())


def call(name, read=None, inputs=()):
    return RecordedCall(name, 0, 0, read, tuple(inputs))


def test_stages_follow_the_order_of_calls():
    names = ["packed_linear", "choose", "top_log_probs", "exact_cos", "top_log_probs", "rank"]
    parts = step_parts([call(name) for name in names], range(14), {})
    found = {(part.op, part.place): (part.stage, part.seconds) for part in parts}
    assert found["packed_linear", ""] == ("verify", 1) and found["choose", ""] == ("verify", 3)
    assert found[COMPILED, "before exact_cos"] == ("commit", 6)
    assert found["rank", ""] == ("draft", 11)
    assert found[COMPILED, "at the end"] == ("draft", 12) and found[HOST, "inputs, state and report"] == ("runtime", 13)
    assert {part.stage for part in parts if part.op == "top_log_probs"} == {"accept", "draft"}
    assert all(a.seconds >= b.seconds for a, b in pairwise(parts))
    alone = step_parts([call("choose"), call("top_log_probs")], range(6), {})
    assert {part.stage for part in alone if part.place == "at the end"} == {"commit"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("module.target.model.model.layers.11.mlp.gate_proj.weight_packed", "mlp.gate_proj"),
        ("module.target.model.lm_head.weight_packed_", "model.lm_head"),
        ("module.drafter.scorer.scorers.1.embed.weight_packed", "embed"),
        ("module.drafter.scorer.scorers.1.weight", "scorers.1"),
        ("module.target.model.layers.2.mlp.experts.gate_up_proj_packed", "mlp.experts.gate_up_proj"),
    ],
)
def test_places_are_weights_without_the_numbers_of_layers(name, place):
    parts = step_parts([call("packed_linear", inputs=[(1, 8), (64, 640), (128, 16)])], range(4), {64: name, 128: "b"})
    assert [part.place for part in parts if part.op == "packed_linear"] == [place]


def test_weights_that_are_read_in_part_have_no_bandwidth():
    names = {64: "embed", 128: "layers.0.up"}
    calls = [
        call("packed_embedding", inputs=[(64, 100)]),
        *[call("packed_linear", inputs=[(1, 9), (128, 50)])] * 2,
        call("tree_attention", read=7, inputs=[(2, 400)]),
    ]
    read = {part.op: part.read for part in step_parts(calls, range(10), names)}
    assert read == {"packed_embedding": None, "packed_linear": 100, "tree_attention": 7, COMPILED: None, HOST: None}
    assert weight_bytes(calls, names) == 50


def test_calls_are_recorded_in_order_and_only_while_asked(engine):
    session = engine.session
    row = session.admit([5, 6, 7, 8], 100, [])
    calls = record(session.step)
    assert can_record() and all(call.begin < call.end for call in calls)
    assert all(a.end <= b.begin for a, b in pairwise(calls))
    session.step()
    assert [call.name for call in record(session.step)] == [call.name for call in calls]
    session.release(row)
    assert record(lambda: None) == []


def test_a_library_that_cannot_record_is_refused_in_one_line(engine, monkeypatch):
    monkeypatch.setattr(measure, "can_record", lambda: False)
    with pytest.raises(
        EngineError, match=r"profile: expected .* records its ops, got .*; build the engine again"
    ) as error:
        measure.profile(engine.session, TOKENS, 1, NODES, 1)
    assert "\n" not in str(error.value)

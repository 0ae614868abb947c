"""The TensorRT session over a fake GPU: its memory, bindings and checks are real, ONNX Runtime stands in for plans."""

import ctypes
import gc
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import specstep
from fake_gpu import FakeEngine, fake_driver, fake_library
from specstep.compile.check import compare
from specstep.runtime.engine_file import MANIFEST, file_entry, read_manifest
from specstep.runtime.tensorrt import session as tensorrt_session
from specstep.runtime.tensorrt.device_array import DeviceArray
from specstep.runtime.tensorrt.library import LibraryError, load_library

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9]]


def edit(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def engine(onnx_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine directory as the TensorRT backend writes it, with plans that the fake library knows."""
    folder = shutil.copytree(onnx_folder, tmp_path / "engine")
    spec, device = read_manifest(folder).spec, fake_driver(tmp_path)
    profiles = {"prefill": [(2, 4, 8), (8, 16, 16)], "step": [(1, 1, 1), (2, 2, 2)]}
    engines = {}
    fixed = {"slots": spec.most_slots, "nodes": 1 + spec.nodes}
    for name, sizes in profiles.items():
        (folder / f"{name}.plan").write_bytes(name.encode())
        engines[name.encode()] = FakeEngine(onnx_folder / f"{name}.onnx", fixed, sizes, device)
        (folder / f"{name}.onnx").unlink()
    (folder / "weights.safetensors").unlink()

    def change(manifest: dict[str, Any]) -> None:
        manifest["spec"]["config"] |= {"backend": "tensorrt", "plugins": True}
        for name in ("prefill", "step"):
            manifest["spec"][name]["file"] = f"{name}.plan"
            manifest["files"][f"{name}.plan"] = file_entry(folder / f"{name}.plan")
            del manifest["files"][f"{name}.onnx"]
        del manifest["files"]["weights.safetensors"]
        manifest["requires"] = {"libraries": ["tensorrt 11.4"]}
        plan = {"layers": 1, "plugins": {}, "profiles": [], "tensors": {}}
        manifest["about"] |= {"compute_capability": ["8.9", "12.0"], "plans": {"prefill": plan, "step": plan}}

    edit(folder, change)

    def library(backend: str) -> Any:
        if backend != "tensorrt":
            raise LibraryError(f"{backend}: not installed")
        return fake_library(engines, "11.4")

    monkeypatch.setattr(tensorrt_session, "driver", lambda: device)
    monkeypatch.setattr(tensorrt_session, "load_library", library)
    return folder


def capability(value: int) -> None:
    """Change the fake GPU's compute capability."""
    library = tensorrt_session.driver()._library
    ctypes.c_int.in_dll(library, "capability").value = value


@pytest.mark.parametrize("plugins", [True, False])
def test_equals_the_onnx_folder(plugins: bool, engine: Path, onnx_folder: Path) -> None:
    """Caches bound in place, or copied back; chunked prompts of both profiles; rows that come and go."""
    edit(engine, lambda manifest: manifest["spec"]["config"].update(plugins=plugins))
    expected = specstep.load(onnx_folder).generate(PROMPTS, 24)
    loaded = specstep.load(engine)
    assert [result.token_ids for result in loaded.generate(PROMPTS, 24)] == [result.token_ids for result in expected]
    prefill, step = (plan.engine.used for plan in (loaded.session._prefill.plan, loaded.session._step))
    assert {profile for profile, _ in prefill} == {0, 1} and all(tokens >= 2 for _, tokens in prefill)
    assert set(step) <= {(0, 1), (1, 2)}


def test_a_step_is_one_graph_for_each_number_of_rows(engine: Path, onnx_folder: Path) -> None:
    """Captured after a first call, replayed from then on; a capture is no step."""
    session, expected = specstep.load(engine).session, specstep.load(onnx_folder).session
    seen = []
    for rows in (1, 2, 1):
        for each in (session, expected):
            for prompt in PROMPTS[:rows]:
                each.admit(prompt, 90, [])
        for _ in range(4):
            seen.append((session.step(), expected.step()))
        for each in (session, expected):
            for row in range(2):
                each.release(row)
    assert all(got == want and got for got, want in seen)
    library = session.device._library
    assert ctypes.c_int.in_dll(library, "captures").value == 2
    assert ctypes.c_int.in_dll(library, "launches").value == len(seen) - 2
    assert len(session._step.engine.contexts) == 2


def test_what_a_row_left_behind_does_not_reach_the_next_request(engine: Path, onnx_folder: Path) -> None:
    """NaN in slots that nothing attends to would still reach it through a weight of 0: plans may not mask values."""
    loaded, expected = specstep.load(engine), specstep.load(onnx_folder).generate([[5, 6]], 24)[0]
    rows = [loaded.session.admit(prompt, 90, []) for prompt in PROMPTS[: loaded.session.spec.max_batch]]
    for cache in loaded.session.caches.values():
        cache.write(np.full(cache.shape, np.nan, np.float32))
    for row in rows:
        loaded.session.release(row)
    assert loaded.generate([5, 6], 24).token_ids == expected.token_ids
    assert np.isfinite(loaded.session.caches["keys.0"].read(1)).all()


def test_a_row_that_moved_says_what_it_would_have(engine: Path, onnx_folder: Path) -> None:
    """Its state, and of each head the slots that it holds."""
    session, expected = specstep.load(engine).session, specstep.load(onnx_folder).session
    for each in (session, expected):
        for prompt in (PROMPTS[1], PROMPTS[2]):
            each.admit(prompt, 90, [])
        each.step()
        each.release(0)
    whole = session.caches["keys.1"].read(2)[1]
    assert session.compact(1) == {1: 0}
    moved = session.caches["keys.1"].read(1)[0]
    assert np.array_equal(moved[:, :54], whole[:, :54]) and np.abs(whole[:, 53]).min() > 0
    for _ in range(6):
        assert session.step()[0] == expected.step()[1]


def test_prefixes_are_kept_on_the_device(engine: Path, onnx_folder: Path) -> None:
    """Of each head, runs of slots to the store and back to any row."""
    loaded, expected = specstep.load(engine, prefix_cache_bytes=1 << 20), specstep.load(onnx_folder)
    for prompts in ([PROMPTS[2]], [[*PROMPTS[2][:40], 7, 8], PROMPTS[2], PROMPTS[0]]):
        results = loaded.generate(prompts, 24, ignore_eos=True)
        theirs = expected.generate(prompts, 24, ignore_eos=True)
        assert [result.token_ids for result in results] == [result.token_ids for result in theirs]
    assert [result.stats["cached_tokens"] for result in results] == [31, 31, 0]
    whole, store = loaded.session.caches["keys.1"].read(1)[0], loaded.session._store["keys.1"].read(1)[0]
    assert any(np.array_equal(whole[:, :31], store[:, at + 1 : at + 32]) for at in range(0, store.shape[1], 32))


def variable(loaded: Any, name: str) -> Any:
    """A variable of the fake driver."""
    return ctypes.c_int.in_dll(loaded.session.device._library, name)


@pytest.mark.parametrize(
    "failure",
    ["failing_capture", *(pytest.param(each, marks=pytest.mark.slow) for each in ("run", "failing_instance"))],
)
def test_a_step_that_cannot_be_captured_still_runs(
    failure: str, engine: Path, onnx_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried once, with a warning that says why; no step is lost or taken twice."""
    loaded, expected = specstep.load(engine), specstep.load(onnx_folder)
    if failure == "run":
        loaded.session._step.engine.can_be_captured = False
    else:
        variable(loaded, failure).value = 901
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        got, want = (each.generate(prompts, 24) for each in (loaded, expected))
        assert [result.token_ids for result in got] == [result.token_ids for result in want]
    assert [variable(loaded, name).value for name in ("captures", "launches", "graphs")] == [1, 0, 0]
    assert not ctypes.c_void_p.in_dll(loaded.session.device._library, "capturing")
    (record,) = caplog.records
    assert record.message.startswith("steps run without CUDA graphs, and slower: a capture failed: ")


def test_an_engine_gives_its_memory_back(engine: Path) -> None:
    """All of it: tensors, streams and graphs."""
    kept = specstep.load(engine)
    names = ("memory", "graphs", "streams")
    before = [variable(kept, name).value for name in names]
    for _ in range(2):
        loaded = specstep.load(engine)
        loaded.generate(PROMPTS, 24)
        assert all(variable(kept, name).value > count for name, count in zip(names, before, strict=True))
        del loaded
        deadline = time.monotonic() + 20
        while [variable(kept, name).value for name in names] != before and time.monotonic() < deadline:
            time.sleep(0.05)  # the worker's thread may still be on its way out
            gc.collect()
        assert [variable(kept, name).value for name in names] == before


def test_an_engine_runs_in_any_thread(engine: Path) -> None:
    loaded = specstep.load(engine)
    expected = loaded.generate(PROMPTS, 24)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(loaded.generate, PROMPTS, 24).result()
    assert [result.token_ids for result in got] == [result.token_ids for result in expected]


def test_short_memory_says_what_to_do(engine: Path) -> None:
    variable(specstep.load(engine), "failing").value = 2
    with pytest.raises(specstep.EngineError, match=r"expected GPU memory .* a fake failure; free some, or build"):
        specstep.load(engine)


@pytest.fixture
def rtx_engine(engine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The same for TensorRT for RTX."""
    fake = tensorrt_session.load_library("tensorrt")
    strategies = {
        "CudaGraphStrategy": SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole"),
        "DynamicShapesKernelSpecializationStrategy": SimpleNamespace(EAGER="eager"),
    }
    rtx = SimpleNamespace(**vars(fake) | strategies)
    monkeypatch.setattr(tensorrt_session, "load_library", lambda backend: rtx)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def change(manifest: dict[str, Any]) -> None:
        manifest["spec"]["config"].update(backend="tensorrt-rtx", plugins=False)
        manifest["requires"] = {}

    edit(engine, change)
    return engine


def test_rtx_replays_by_itself(rtx_engine: Path, onnx_folder: Path) -> None:
    """TensorRT for RTX is asked to capture the step, with kernels that are compiled at once."""
    loaded = specstep.load(rtx_engine)
    expected = specstep.load(onnx_folder).generate(PROMPTS, 24)
    assert [result.token_ids for result in loaded.generate(PROMPTS, 24)] == [result.token_ids for result in expected]
    session = loaded.session
    configs = [vars(context.config) for context in session._step.engine.contexts]
    asked = {"cuda_graph_strategy": "whole", "dynamic_shapes_kernel_specialization_strategy": "eager"}
    assert configs and all({name: config[name] for name in asked} == asked for config in configs)
    assert [set(vars(context.config)) for context in session._prefill.plan.engine.contexts] == [{"cache"}]
    assert variable(loaded, "captures").value == 0


def test_rtx_keeps_the_kernels_that_it_compiled(rtx_engine: Path, tmp_path: Path) -> None:
    """From process to process, for each plan; a file that is not taken is replaced."""
    folder = tmp_path / "cache" / "specstep" / "kernels"

    def kept() -> list[bytes]:
        return sorted(path.read_bytes() for path in folder.iterdir())

    specstep.load(rtx_engine).generate([5, 6, 7], 8)
    assert kept() == [b"kernels 1", b"kernels 3"]  # of a step of one row, of a prompt of three tokens
    specstep.load(rtx_engine).generate(PROMPTS, 8)
    assert kept() == [b"kernels 1 2", b"kernels 3 16"]
    for path in folder.iterdir():
        path.write_bytes(b"of another version")
    specstep.load(rtx_engine).generate([5, 6, 7], 8)
    assert kept() == [b"kernels 1", b"kernels 3"]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("no folder")
    assert specstep.load(rtx_engine).generate([5, 6, 7], 8).token_ids


def test_reads_and_writes_what_a_step_reads(engine: Path, onnx_folder: Path) -> None:
    """A session goes on where another, of another backend, stands."""
    session, other = specstep.load(engine).session, specstep.load(onnx_folder).session
    session.admit(PROMPTS[0], 90, [])
    session.admit(PROMPTS[2], 90, [])
    session.step()
    held = session.read(2, 128)
    other.write(held)
    assert all(np.array_equal(held[name], array) for name, array in other.read(2, 128).items())
    nodes = session.spec.nodes
    assert np.array_equal(session.replay(2, 128, nodes, 8), other.replay(2, 128, nodes, 8))
    expected = other.read(2, 128)
    got = session.read(2, 128)
    assert all(np.array_equal(got[name], array) for name, array in expected.items())


def test_check_compares_a_plan_with_torch(engine: Path, onnx_folder: Path, model_folder: Path) -> None:
    result = compare([engine, onnx_folder], model=str(model_folder), steps=4)
    assert result.agree and [worst.runners[1].split()[0] for worst in result.worst] == ["tensorrt", "onnx"]
    used = specstep.load(engine).session._step.engine.used
    assert sorted(used) == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_bfloat16_is_read_and_written_as_float32(tmp_path: Path) -> None:
    array = DeviceArray(fake_driver(tmp_path), 7, (3, 2, 4), "bfloat16")
    values = np.array([[1.5, -2.0], [0.0, 2.0**100]], np.float32).reshape(2, 2, 1)
    array.write(values)
    read = array.read(3)
    assert np.array_equal(read[:2, :, :1], values) and not read[2].any() and not read[:, :, 1:].any()
    assert array.bits(1)[0, :, 0].tolist() == [0x3FC0, 0xC000]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: capability(90), "compute_capability: expected one of 8.9, 12.0, this GPU has 9.0"),
        (
            lambda folder: edit(folder, lambda m: m["requires"].update(libraries=["tensorrt 10.9"])),
            "libraries: expected tensorrt 10.9, this machine lacks tensorrt 10.9",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["step"].update(file="prefill.plan")),
            "expected the inputs and outputs of the manifest, got a difference in",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["step"].update(file="tokenizer.json")),
            "tokenizer.json: expected a plan that tensorrt 11.4 loads, got one that it refuses",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["caches"][0].update(dtype="float16")),
            "keys.0.dtype: expected float32, got 'float16'",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["config"].update(backend="tensorrt-rtx")),
            "tensorrt-rtx: not installed",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["config"].update(backend="inductor")),
            "files: expected weights.safetensors, got .?none",
        ),
        (
            lambda folder: edit(folder, lambda m: m["spec"]["config"].update(backend="onnx")),
            "libraries: expected tensorrt 11.4",
        ),
    ],
)
def test_engines_that_do_not_fit_are_refused(engine: Path, damage: Any, message: str) -> None:
    damage(engine)
    with pytest.raises(specstep.SpecstepError, match=message):
        specstep.load(engine)


def test_a_machine_without_a_gpu_is_told_what_is_missing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specstep.runtime.tensorrt.driver import Driver

    monkeypatch.setattr(tensorrt_session, "driver", lambda: Driver("libcuda-that-is-not-there.so"))
    with pytest.raises(specstep.EngineError, match=r"expected an NVIDIA GPU of compute capability 8.9, 12.0, got none"):
        specstep.load(engine)


def test_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(
        LibraryError, match=r"tensorrt: expected the Python module tensorrt, got .*specstep\[tensorrt\]"
    ):
        load_library.__wrapped__("tensorrt")


def test_rtx_is_seen_where_it_is_installed() -> None:
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("needs tensorrt-rtx")
    assert f"tensorrt-rtx {version('tensorrt-rtx-cu13')}" in tensorrt_session.machine()["libraries"]


@pytest.mark.parametrize("first", ["tensorrt_rtx", "specstep.runtime.tensorrt.session"])
def test_a_library_that_others_imported_is_not_built_with(first: str) -> None:
    """Its parser would end the process at the first plugin."""
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("needs tensorrt-rtx")
    program = f"""
import {first}
from specstep.runtime.tensorrt.library import LibraryError, check_parser, load_library
load_library("tensorrt-rtx")
try:
    check_parser()
except LibraryError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ("expected specstep to import tensorrt_rtx" in run.stdout) == (first == "tensorrt_rtx")


def test_running_needs_no_torch() -> None:
    if find_spec("tensorrt_rtx") is None:
        pytest.skip("needs tensorrt-rtx")
    program = """
import sys
from specstep.runtime import load as loading
from specstep.runtime.tensorrt import session as tensorrt_session
assert tensorrt_session.machine()["libraries"]
from specstep.runtime.tensorrt import plugins
with plugins.registered():
    pass
assert not {"torch", "triton", "onnx", "transformers"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)

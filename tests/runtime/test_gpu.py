"""Which GPU, and whether its memory is enough: on a machine without one."""

import dataclasses
from types import SimpleNamespace

import pytest
import specstep
import torch
from specstep.errors import EngineError, InputError
from specstep.runtime.engine_file import TensorSpec, read_manifest
from specstep.runtime.gpu import gpu_number, plan_memory
from specstep.runtime.inductor import aoti
from specstep.runtime.inductor.cuda_graph import Reports
from specstep.runtime.inductor.torch_session import TorchSession


@pytest.mark.parametrize(("device", "number"), [(None, None), ("cuda", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_names(device, number):
    assert gpu_number(device) == number


@pytest.mark.parametrize("device", ["", "cpu", "gpu", "cuda:", "cuda:-1", "cuda:1.5", "1"])
def test_other_names_are_refused(device):
    with pytest.raises(InputError, match=f"device: expected cuda or one GPU as cuda:1, got '{device}'"):
        gpu_number(device)


@pytest.mark.parametrize("folder", ["engine_folder", "onnx_folder"])
def test_engines_of_a_cpu_take_none(folder, request):
    with pytest.raises(InputError, match="device: expected none for this engine, got cuda:0"):
        specstep.load(request.getfixturevalue(folder), device="cuda:0")


@pytest.mark.parametrize(
    ("dtype", "size"), [("int64", 8), ("int32", 4), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("uint8", 1)]
)
def test_bytes_of_a_tensor(dtype, size):
    assert TensorSpec("x", (3, 5), dtype).nbytes == 15 * size


def test_memory_is_planned(engine_folder):
    manifest = read_manifest(engine_folder)
    manifest.files["weights.safetensors"]["bytes"] = 16_060_000_000
    caches = tuple(TensorSpec(f"keys.{i}", (16, 8, 4096, 128), "bfloat16") for i in range(64))
    state = (TensorSpec("features", (16, 8, 4096), "float32"),)
    manifest = dataclasses.replace(
        manifest, spec=dataclasses.replace(manifest.spec, caches=caches, state=state, shared=())
    )
    parts = "weights 16.06, caches 8.59, state 0.00"
    assert plan_memory(manifest, 80 * 10**9, "cuda:1") == (f"takes 24.65 of 80.00 GB that are free on cuda:1: {parts}")
    ranks = dataclasses.replace(manifest.spec, config=manifest.spec.config | {"ranks": 2})
    files = manifest.files | {"weights.rank1.safetensors": {"bytes": 9_000_000_000}}
    of_rank = dataclasses.replace(manifest, spec=ranks, files=files)
    assert "weights 9.00" in plan_memory(of_rank, 80 * 10**9, "cuda:1", rank=1)
    with pytest.raises(EngineError) as told:
        plan_memory(manifest, 24 * 10**9, "cuda:1")
    assert str(told.value) == (
        f"memory: expected 24.65 GB free on cuda:1 ({parts}), got 24.00; free some, or build the engine again with "
        "`specstep build` and a smaller --max-batch or --max-seq-len"
    )


def test_a_gpu_that_is_not_there_is_refused(engine_folder, monkeypatch):
    manifest = read_manifest(engine_folder)
    manifest = dataclasses.replace(manifest, spec=dataclasses.replace(manifest.spec, device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="device: expected one of the 2 GPUs here, got cuda:2"):
        aoti.open_session(engine_folder, manifest, 2, print)


def test_too_few_gpus_for_all_ranks_are_told_ahead_of_all_else(engine_folder, monkeypatch):
    manifest = read_manifest(engine_folder)
    spec = dataclasses.replace(manifest.spec, device="cuda", config=manifest.spec.config | {"ranks": 2})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: torch.no_grad())
    with pytest.raises(InputError, match="device: expected 2 GPUs from cuda:1 on, one for each rank, got 1"):
        aoti.open_session(engine_folder, dataclasses.replace(manifest, spec=spec), 1, print)


def test_weights_go_to_the_current_gpu(engine_folder, monkeypatch):
    """And not to the first one: a rank of another GPU has its own there."""
    spec = dataclasses.replace(read_manifest(engine_folder).spec, device="cuda")
    asked, real = [], aoti.safe_open

    def opened(path, framework, device):
        asked.append(device)
        return real(path, framework, "cpu")

    monkeypatch.setattr(aoti, "safe_open", opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert aoti.open_weights(engine_folder / "weights.safetensors", spec)
    assert asked == ["cuda:3"]


def test_reports_of_two_steps_may_be_on_their_way(monkeypatch):
    """Each is waited for by the event behind it, whatever came since."""
    waited, make = [], torch.empty

    class Event:
        def synchronize(self):
            waited.append(self.number)

        def record(self):
            Event.made = self.number = getattr(Event, "made", 0) + 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **options: make(*shape, **options))
    reports, steps = Reports(3, 4), [torch.full((rows, 4), rows) for rows in (1, 3, 2)]
    first, second = reports.fetch(steps[0]), reports.fetch(steps[1])
    got = [first(), second(), reports.fetch(steps[2])()]
    assert [report.tolist() for report in got] == [step.tolist() for step in steps] and waited == [1, 2, 3]


@pytest.mark.parametrize(
    ("nodes", "catch_up", "captured"),
    [(3, 0, 0), (3, 1, 5), (3, 5, 5), (3, 6, 12), (3, 12, 12), (0, 1, 2), (0, 9, 9), (9, 7, 7), (9, 8, 14)],
)
def test_few_graphs_are_captured_for_what_is_caught_up(nodes, catch_up, captured):
    """Nothing; a path of the nodes, five levels of them at most, and one token; or the eight that are not left out."""
    session = SimpleNamespace(spec=SimpleNamespace(depth=5))
    assert TorchSession._captured_catch_up(session, nodes, catch_up) == captured

"""Plugins of TensorRT for RTX: what a plan stores of them, and how they launch, over a fake CUDA driver."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import array_at, fake_driver
from specstep.kernels.ptx import Binary
from specstep.runtime.tensorrt.driver import Driver, DriverError
from specstep.runtime.tensorrt.library import LibraryError, load_library

try:
    trt = load_library("tensorrt-rtx")
except LibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

from specstep.kernels.plugins import PLUGINS as EVERY
from specstep.runtime.tensorrt import plugins

PLUGINS = {plugin.name: plugin for plugin in EVERY}
BINARY = Binary("compact_cache_kernel", 128, 64, {"BLOCK_P": 4}, ".visible .entry compact_cache_kernel()")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return fake_driver(tmp_path_factory.mktemp("cuda"))


def test_a_plan_stores_what_a_runtime_needs() -> None:
    creator = plugins.Creator(PLUGINS["accept"], (89,))
    field = trt.PluginField("max_depth", np.array([5], np.int32), trt.PluginFieldType.INT32)
    built = creator.create_plugin("node", trt.PluginFieldCollection([field]), trt.TensorRTPhase.BUILD)
    assert built.attributes == {"max_depth": 5} and built.binaries == {89: None}
    built.binaries = {89: BINARY, 120: BINARY}
    loaded = creator.create_plugin("node", built.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert loaded.attributes == {"max_depth": 5} and loaded.binaries == {89: BINARY, 120: BINARY}
    assert loaded.clone().binaries == loaded.binaries


def test_a_missing_attribute_is_an_error() -> None:
    creator = plugins.Creator(PLUGINS["accept"], (89,))
    with pytest.raises(ValueError, match=r"accept: expected the attributes \['max_depth'\], got \[\]"):
        creator.create_plugin("node", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)


def test_enqueue_passes_inputs_scalars_and_outputs(device: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "driver", lambda: device)
    seen: list[Any] = []
    types = [*[ctypes.c_uint64] * 4, *[ctypes.c_int32] * 5, ctypes.c_uint64]

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p))
    def launched(name: bytes, sizes: Any, parameters: Any) -> None:
        values = [ctypes.cast(parameters[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(types)]
        seen.append((name, sizes[:7], values))

    device._library.set_launch_callback(launched)
    plugin = plugins.RtxPlugin(PLUGINS["compact"], {}, {89: BINARY})
    described = []
    for dims in ((2, 3, 64, 16), (2,), (2, 6), (2,), (2, 3, 64, 16)):
        described.append(trt.PluginTensorDesc())
        described[-1].dims = dims
    plugin.enqueue(described[:4], described[4:], [11, 12, 13, 14], [11], 0, 7)
    assert seen == [(b"compact_cache_kernel", [2, 3, 1, 128, 1, 1, 64], [11, 12, 13, 14, 6, 64, 3072, 1024, 16, 11])]


def test_driver_moves_bytes_and_names_what_failed(device: Driver) -> None:
    assert device.capability() == 89
    stream, data = device.stream(), np.arange(6, dtype=np.int64).reshape(2, 3)
    first, second = device.allocate(48), device.allocate(48)
    assert array_at(first, (6,), np.int64).tolist() == [0] * 6
    device.upload(first, data, stream)
    device.copy(second, first, 48, stream)
    back = np.empty_like(data)
    device.download(back, second, stream)
    assert np.array_equal(back, data)
    device.free(second)
    ctypes.c_int.in_dll(device._library, "failing").value = 2
    with pytest.raises(DriverError, match="cuStreamCreate: expected success, got error 2: a fake failure"):
        device.stream()
    ctypes.c_int.in_dll(device._library, "failing").value = 0


def test_no_driver_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="CUDA: expected an NVIDIA driver, got"):
        Driver(str(tmp_path / "libcuda.so.1"))

"""The exporter's translations are read once; what an export adds to them is its own."""

import pytest
import torch
from specstep.compile.onnx.operators_read_once import operators_read_once

exporter = pytest.importorskip("onnxscript") and pytest.importorskip("torch.onnx._internal.exporter._registration")


def test_an_export_has_a_registry_of_its_own(monkeypatch):
    read, find = [], exporter.onnxscript_apis.get_torchlib_ops
    monkeypatch.setattr(exporter.onnxscript_apis, "get_torchlib_ops", lambda: read.append(1) or find())
    monkeypatch.setattr("specstep.compile.onnx.operators_read_once._read", {})
    target, whole = torch.ops.aten.sin.default, exporter.ONNXRegistry.from_torchlib(opset_version=20)
    with operators_read_once():
        first, second = (exporter.ONNXRegistry().from_torchlib(opset_version=20) for _ in range(2))
        first.register_op(target=target, function=lambda x: x)
        third = exporter.ONNXRegistry.from_torchlib(opset_version=20)
        assert exporter.ONNXRegistry.from_torchlib(opset_version=18).opset_version == 18
    assert len(read) == 3  # ahead of it, and for each version of operators
    assert second.functions.keys() == third.functions.keys() == whole.functions.keys()
    found = len(whole.get_decomps(target))
    assert [len(one.get_decomps(target)) for one in (first, second, third)] == [found + 1, found, found]
    assert exporter.ONNXRegistry.from_torchlib.__func__ is not None  # a class method again

"""What a program was not compiled for is refused in one line, also where all sums are right: it never reaches native
code."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from specstep.compile.inductor.signature import signature_of
from specstep.errors import EngineError
from specstep.runtime import open_directory
from specstep.runtime.engine_file import MANIFEST, WEIGHTS, file_entry
from specstep.runtime.inductor import aoti
from specstep.runtime.inductor.signature import Signature, TensorKind

ALTERED = {  # kind of tensor, what is altered of the first whose name ends so -> the value
    ("state", "prediction_offset", "dtype"): lambda dtype: "int8",
    ("state", "prediction_offset", "shape"): lambda shape: [*shape, 1],
    ("shared", "", "dtype"): lambda dtype: "int32",
    ("caches", "keys.1", "shape"): lambda shape: [shape[0], shape[1] + 1, *shape[2:]],
    ("caches", "values.0", "shape"): lambda shape: [*shape[:3], shape[3] - 1],
}
WRONG = {
    "shape": lambda tensor: tensor.transpose(0, -1).contiguous(),
    "dimensions": lambda tensor: tensor[None],
    "dtype": lambda tensor: tensor.to(torch.float16),
    "bytes": lambda tensor: tensor.view(torch.int32),
    "gone": lambda tensor: None,
}


def opened(folder):
    return open_directory.open_directory(folder, True, None, print)


def linked(folder, target):
    """A copy of an engine whose files may be replaced."""
    target.mkdir()
    for path in folder.iterdir():
        os.link(path, target / path.name)
    return target


def put_manifest(folder, manifest):
    (folder / MANIFEST).unlink()  # the link's other end stays as it is
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("case", ALTERED, ids=".".join)
def test_tensors_of_the_manifest_are_those_of_the_program(engine_folder, tmp_path, case):
    kind, ends, field = case
    manifest = json.loads((engine_folder / MANIFEST).read_text())
    tensor = next(tensor for tensor in manifest["spec"][kind] if tensor["name"].endswith(ends))
    tensor[field] = ALTERED[case](tensor[field])
    folder = linked(engine_folder, tmp_path / "engine")
    put_manifest(folder, manifest)
    with pytest.raises(EngineError) as refused:
        opened(folder)
    assert tensor["name"] in str(refused.value) and str(refused.value).isprintable()


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_are_those_of_the_program(engine_folder, tmp_path, wrong):
    folder = linked(engine_folder, tmp_path / "engine")
    weights = load_file(folder / WEIGHTS)
    name = next(name for name, tensor in weights.items() if tensor.ndim > 1 and len({*tensor.shape}) > 1)
    weights[name] = WRONG[wrong](weights[name])
    (folder / WEIGHTS).unlink()
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / WEIGHTS)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][WEIGHTS] = file_entry(folder / WEIGHTS)
    put_manifest(folder, manifest)
    with pytest.raises(EngineError) as refused:
        opened(folder)
    assert f"weights: '{name}': expected " in str(refused.value) and str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError("Error in dlopen: no such\nframe #0: a\n"),
            "engine: expected a program that loads, got Error in",
        ),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes\n"), "memory: expected "),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nx"), "memory: expected "),
        (MemoryError(), "memory: expected "),
    ],
)
def test_only_what_an_allocator_says_is_about_memory(engine_folder, monkeypatch, error, line):
    def fail(*given):
        raise error

    monkeypatch.setattr(aoti, "open_weights", fail)
    with pytest.raises(EngineError) as refused:
        opened(engine_folder)
    assert str(refused.value).startswith(line) and str(refused.value).isprintable()


def test_a_signature_is_that_of_the_traced_program():
    class Scaled(torch.nn.Linear):
        def forward(self, x, count):
            return super().forward(x), count + 1

    x, count = torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)
    rows = {0: torch.export.Dim("rows", min=1, max=9)}
    signature = signature_of(torch.export.export(Scaled(4, 5), (x, count), dynamic_shapes=(rows, {})))
    assert signature == Signature(
        [TensorKind("float32", [None, 4]), TensorKind("int64", [2])],
        [TensorKind("float32", [None, 5]), TensorKind("int64", [2])],
        {"weight": TensorKind("float32", [5, 4]), "bias": TensorKind("float32", [5])},
    )
    assert Signature.read(signature.metadata()) == signature

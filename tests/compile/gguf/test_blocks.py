"""Blocks of a GGUF file are found again by their values, wherever a model has put their rows, and a build takes them as
they are."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import specstep
import torch
from gguf import GGMLQuantizationType as Type
from specstep.compile import precision as precision_module
from specstep.compile.build import note_held_types
from specstep.compile.config import make_config
from specstep.compile.gguf import weights
from specstep.compile.gguf.blocks import NAMES, kept_weights, read_blocks, widened_tensors
from specstep.compile.gguf.file import read_gguf
from specstep.compile.gguf.weights import widened
from specstep.compile.kept_groups import KeptGroups
from specstep.compile.on_disk import OnDisk
from specstep.compile.precision import choose_precision, kept_on
from specstep.compile.source import load_source
from specstep.kernels.linear.groups import GROUP_KINDS, pack_groups, unpack_groups
from torch import Tensor

TYPES = {"first": Type.Q8_0, "second": Type.Q4_0, "third": Type.Q4_1, "fourth": Type.Q4_1, "fifth": Type.F16}


def write_tensors(path: Path, tensors: dict[str, tuple[np.ndarray, Type]]) -> Path:
    """A file of tensors as they lie in it."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_file(path: Path, tensors: dict[str, tuple[np.ndarray, Type]]) -> Path:
    """A file of numbers, quantised."""
    quantized = {}
    for name, (values, kind) in tensors.items():
        data = gguf.quantize(values, kind)
        if kind == Type.Q4_1:  # least values that are no multiple of the scale
            data = data.copy().reshape(len(values), -1, 20)
            data[..., 2:4] = np.frombuffer(np.float16(-0.0313).tobytes(), np.uint8)
            data = data.reshape(len(values), -1)
        quantized[name] = data, kind
    return write_tensors(path, quantized)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    tensors = {name: (random.normal(size=(40, 96)).astype(np.float32), kind) for name, kind in TYPES.items()}
    return write_file(tmp_path_factory.mktemp("gguf") / "model.gguf", tensors)


def values_of(file: Path, name: str) -> Tensor:
    """What the file says, in float32."""
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))


HALVES = {  # where a block of each type has float16
    Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q2_K: [80, 82],
    Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.IQ4_NL: [0], Type.IQ4_XS: [0],
}  # fmt: skip


def random_blocks(kind: Type, rows: int, depth: int) -> np.ndarray:
    """Any bits where quants and small scales are, finite numbers where floats are."""
    random = np.random.default_rng(int(kind))
    size, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, depth // size, width), dtype=np.uint8)
    for at in HALVES.get(kind, []):
        blocks[..., at : at + 2] = random.normal(size=(rows, depth // size, 1)).astype(np.float16).view(np.uint8)
    if kind == Type.MXFP4:
        blocks[..., 0] = random.integers(104, 144, blocks.shape[:2])
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.name)
def test_every_type_says_the_numbers_of_ggml(kind: Type) -> None:
    """Whatever lies in a block, before it is packed and after."""
    rows = random_blocks(kind, 37, 768)
    exact = torch.from_numpy(np.array(gguf.dequantize(rows, kind)))
    groups = read_blocks(kind, rows)
    assert groups.kind == NAMES[kind] and torch.equal(groups.values(768), exact)
    assert torch.equal(unpack_groups(pack_groups(groups), 37).values(768), exact)


@pytest.mark.parametrize("kind", [*NAMES, Type.TQ1_0, Type.BF16, Type.F16], ids=lambda kind: kind.name)
def test_a_model_is_loaded_with_the_numbers_of_ggml(
    kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at a time."""
    if kind in NAMES:
        rows = random_blocks(kind, 37, 768)
    else:
        rows = gguf.quantize(np.random.default_rng(0).normal(size=(37, 768)).astype(np.float32), kind)
    if kind == Type.MXFP4:
        rows.reshape(37, -1, 17)[7, 1, 0] = 150  # float16 has no such scale
    tensor = read_gguf(write_tensors(tmp_path / "model.gguf", {"weight": (rows, kind)})).tensors["weight"]
    monkeypatch.setattr(weights, "VALUES", 768 * 10)
    exact = torch.from_numpy(np.array(gguf.dequantize(rows, kind)))
    assert torch.equal(widened(tensor, torch.float32), exact)
    assert torch.equal(widened(tensor, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("factor", [2.0**-9, 0.0007, 3e-7])
def test_blocks_of_the_converter_have_a_factor(factor: float, tmp_path: Path) -> None:
    """Of each expert here; of both experts where there is one number. float16 does not hold all scales of the last."""
    rows = random_blocks(Type.NVFP4, 40, 128)
    rows.reshape(40, 2, 36)[..., :4] |= 64  # no scale is next to nothing beside the others of its row
    exact = torch.from_numpy(np.array(gguf.dequantize(rows, Type.NVFP4))).unflatten(0, (2, 20))
    floats = Type.F32
    for number, factors in enumerate(([factor, 2 * factor], [factor])):
        scales = {"a.scale": (np.array(factors, np.float32), floats), "a.input_scale": (np.ones(2, np.float32), floats)}
        tensors = {"a.weight": (rows.reshape(2, 20, -1), Type.NVFP4), **scales}
        file = write_tensors(tmp_path / f"{number}.gguf", tensors)
        [(name, tensor)] = read_gguf(file).tensors.items()
        expected = exact * torch.tensor(factors, dtype=torch.float32)[:, None, None]
        assert name == "a.weight"
        torch.testing.assert_close(widened(tensor, torch.float32), expected, rtol=2**-22, atol=0)
        kept = factor > 1e-6
        assert widened_tensors(file) == ({} if kept else {"nvfp4": ["a.weight"]})
        for weight in kept_weights(file):
            groups = weight.read(slice(None)).values(128).view(2, 20, 128)
            torch.testing.assert_close(groups, expected, rtol=2**-11, atol=float(expected.abs().max()) * 2**-15)
            assert torch.equal(widened(tensor, torch.bfloat16), groups.bfloat16())
        assert len(kept_weights(file)) == kept


def test_a_factor_of_another_size_is_refused(tmp_path: Path) -> None:
    tensors = {
        "a.weight": (random_blocks(Type.NVFP4, 40, 128), Type.NVFP4),
        "a.scale": (np.ones(2, np.float32), Type.F32),
    }
    with pytest.raises(specstep.BuildError, match=r"a.scale: expected 1 numbers of F32, got F32 \(2,\)"):
        read_gguf(write_tensors(tmp_path / "model.gguf", tensors))


def test_types_without_a_kernel_are_named(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 256)).astype(np.float32)
    kinds = {"first": Type.TQ1_0, "third": Type.TQ1_0, "fourth": Type.F16}
    tensors = {name: (gguf.quantize(values, kind), kind) for name, kind in kinds.items()}
    tensors["second"] = random_blocks(Type.Q6_K, 4, 256), Type.Q6_K
    file = write_tensors(tmp_path / "model.gguf", tensors)
    assert widened_tensors(file) == {"tq1_0": ["first", "third"]}


def test_every_kind_of_groups_has_a_type() -> None:
    assert sorted(NAMES.values()) == sorted(GROUP_KINDS)


@pytest.mark.parametrize(("exponent", "kept"), [(103, False), (104, True), (143, True), (144, False)])
def test_scales_beyond_float16_are_not_kept(exponent: int, kept: bool, tmp_path: Path) -> None:
    rows = random_blocks(Type.MXFP4, 20, 96)
    rows.reshape(20, 3, 17)[7, 1, 0] = exponent
    file = write_tensors(tmp_path / "model.gguf", {"weight": (rows, Type.MXFP4)})
    found = kept_weights(file)
    assert bool(found) == kept
    assert widened_tensors(file) == ({} if kept else {"mxfp4": ["weight"]})
    if kept:
        exact = torch.from_numpy(np.array(gguf.dequantize(rows, Type.MXFP4)))
        assert torch.equal(found[0].read(slice(None)).values(96), exact)


@pytest.mark.parametrize(("name", "kind"), (("first", "int8"), ("second", "int4"), ("third", "int4_least")))
def test_rows_are_found_in_any_order_and_company(file: Path, name: str, kind: str) -> None:
    blocks, values = KeptGroups(kept_weights(file)), values_of(file, name)
    order = torch.randperm(40)
    arrangements = [values, values[order], values[:7], values.view(4, 10, 96)]
    if name == "third":
        arrangements.append(torch.cat([values, values_of(file, "fourth")])[torch.randperm(80)])
    for exact in arrangements:
        weight = exact.bfloat16()
        assert blocks.kind(weight) == kind
        found = blocks.groups(weight)
        assert found.kind == kind and torch.equal(found.values(96), exact)  # not rounded: the blocks' own values


def test_what_is_not_in_the_file_is_not_found(file: Path) -> None:
    blocks, weight = KeptGroups(kept_weights(file)), values_of(file, "first").bfloat16()
    other = weight.clone()
    other[3, 5] += 1
    mixed = torch.cat([weight, values_of(file, "second").bfloat16()])
    for unknown in (other, mixed, weight.float(), weight[:, :64], weight[:0], values_of(file, "fifth").bfloat16()):
        assert blocks.kind(unknown) is None
        with pytest.raises(ValueError, match="weight: expected rows of the model"):
            blocks.groups(unknown)


def test_precision_of_each_choice(file: Path) -> None:
    known, own = values_of(file, "third").bfloat16(), torch.randn(40, 96).bfloat16()
    drafting, head = torch.randn(24, 96).bfloat16(), torch.randn(8, 96).bfloat16()  # 8 outputs are the vocabulary here

    def kinds(weights: str, dtype: str = "bfloat16") -> list[str]:
        config = make_config({"weights": weights, "dtype": dtype})
        precision = choose_precision(config, [file], 8, {drafting.data_ptr(), head.data_ptr()})
        return [precision(weight).kind for weight in (known, own, drafting, head, own.float())]

    assert kinds("auto") == ["int4_least", "bfloat16", "int4", "int8", "float32"]
    assert kinds("bfloat16") == ["bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32"]
    assert kinds("int8") == ["int8", "int8", "int8", "int8", "float32"]
    assert kinds("int4") == ["int4", "int4", "int4", "int8", "float32"]
    assert kinds("auto", "float32")[0] == "bfloat16"
    made = choose_precision(make_config({}), [file], 8, {})(known).make(known)
    assert torch.equal(unpack_groups(made, 40).values(96), values_of(file, "third"))


def test_rows_of_zeros_are_of_the_kind_of_their_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds have such rows; a part of a weight with nothing else is of either."""
    rows = {}
    for name, kind in (("first", Type.Q8_0), ("second", Type.Q4_0)):
        values = np.random.default_rng(0).standard_normal((48, 96), dtype=np.float32)
        values[16:32] = 0
        rows[name] = gguf.quantize(values, kind), kind
    file = write_tensors(tmp_path / "zeros.gguf", rows)
    monkeypatch.setattr(precision_module, "ROWS", 16)
    precision = choose_precision(make_config({}), [file], 8, {})
    for name, kind in (("first", "int8"), ("second", "int4")):
        weight = values_of(file, name).bfloat16()
        form = precision(weight)
        assert form.kind == kind
        assert torch.equal(unpack_groups(form.make(weight), 48).values(96), values_of(file, name))


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_a_weight_is_packed_by_rows_as_at_once(weights: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, disk = values_of(file, "third").bfloat16(), OnDisk()
    precision = choose_precision(make_config({"weights": weights}), [file], 8, {})
    at_once = precision(weight).make(weight)
    stacked = [weight[:24], weight[16:]]
    monkeypatch.setattr(precision_module, "ROWS", 16)
    assert torch.equal(precision(weight).make(weight), at_once)
    on_disk = kept_on(disk, precision)(torch.stack(stacked))
    assert on_disk.kind == precision(weight).kind
    packed = on_disk.make(torch.stack(stacked))
    disk.release_all()
    for got, part in zip(packed, stacked, strict=True):
        assert torch.equal(got, precision(part).make(part))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int3"}, "weights: expected one of auto, bfloat16, int8, int4, fp8, got int3"),
        ({"weights": "int8", "dtype": "float32"}, "weights: expected auto with dtype float32 on cpu, got int8"),
        ({"weights": "int8", "backend": "onnx"}, "weights: expected auto with dtype float32 on cpu, got int8"),
        ({"weights": "int4", "backend": "tensorrt"}, "weights: expected auto for backend tensorrt, got int4; inductor"),
        ({"weights": 8}, "weights: expected a string, got 8"),
    ],
)
def test_choices_that_no_engine_has_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(specstep.BuildError, match=message):
        make_config(options)


def test_a_type_that_is_not_known_is_named_with_those_that_are(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    place = data.index(b"second") + len("second") + 4 + 2 * 8  # behind the number of dimensions, and those
    assert data[place] == Type.Q4_0
    for number, name in ((77, "type 77"), (int(Type.I8), "I8 in second")):
        data[place] = number
        odd = tmp_path / f"{number}.gguf"
        odd.write_bytes(data)
        with pytest.raises(specstep.BuildError, match=rf"expected tensors of F32, F16, .*Q4_1.*, got {name}"):
            load_source(str(odd), "float32", "cpu")


def test_a_build_says_when_it_rounds_blocks_again(file: Path) -> None:
    said: list[str] = []
    for options in ({}, {"weights": "bfloat16"}, {"weights": "int4"}):
        note_held_types(str(file), make_config(options), said.append)
    note_held_types("some/model", make_config({"weights": "int8"}), said.append)
    assert len(said) == 1 and "holds blocks of q8_0, q4_0, q4_1, which int4 rounds again; --weights auto" in said[0]


def test_what_runs_without_an_artifact_refuses_quantised_weights() -> None:
    with pytest.raises(specstep.BuildError, match="weights: expected auto or bfloat16 without an artifact, got int8"):
        specstep.eager("no/model", weights="int8")

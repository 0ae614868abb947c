"""A GGUF file says what it says to gguf's own reader; parts are joined; what is no whole file ends in one line."""

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from specstep.compile.gguf.file import read_gguf
from specstep.errors import BuildError

TENSORS = {"one.weight": torch.arange(64.0).view(2, 32), "two.weight": torch.ones(3), "three.weight": torch.zeros(1, 4)}


def saved(path, **options):
    return write_gguf(path, "llama", {"context_length": 64, "names": ["é", "北京"]}, TENSORS, **options)


def test_a_file_says_the_same_as_to_ggufs_reader(tmp_path):
    path = saved(tmp_path / "model.gguf")
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    own = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == own
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(file.tensors[tensor.name].data, tensor.data)


def test_the_parts_of_a_file_are_joined_whichever_is_given(tmp_path):
    saved(tmp_path / "model.gguf", split_max_tensors=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for part in parts:
        file = read_gguf(part)
        assert file.metadata["llama.context_length"] == 64
        assert sorted(file.tensors) == sorted(TENSORS)
    parts[1].unlink()
    with pytest.raises(BuildError, match=r"expected 3 parts in its folder, got none named model-00002-of-00003\.gguf"):
        read_gguf(parts[0])
    odd = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(BuildError, match=r"expected a name that ends in -00001-of-00003\.gguf, got first\.gguf"):
        read_gguf(odd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "expected a GGUF file, got one that begins with b''"),
        (lambda data: b"GGML" + data[4:], "expected a GGUF file, got one that begins with b'GGML'"),
        (lambda data: data[:4] + b"\1" + data[5:], "GGUF version: expected 2 or 3, got 1"),
        (lambda data: data[:300], "expected a whole GGUF file, got a damaged one"),
        (lambda data: data[:-100], r"expected a whole GGUF file, got a damaged one \(\d+ bytes, .* ends at \d+\)"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "expected a whole GGUF file, got a damaged one"),
    ],
)
def test_what_is_no_whole_file_is_refused_in_one_line(tmp_path, change, message):
    path = saved(tmp_path / "model.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BuildError, match=message) as error:
        read_gguf(path)
    assert "\n" not in str(error.value)


def test_a_big_endian_file_is_refused(tmp_path):
    path = saved(tmp_path / "model.gguf", endianess=gguf.GGUFEndian.BIG)
    with pytest.raises(BuildError, match="expected a little-endian GGUF file, got a big-endian one"):
        read_gguf(path)

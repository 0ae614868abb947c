"""A file's weights lie on the disk, widened and packed, and what was read of it leaves memory."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_case import case_model, save_case
from gguf_cases import CASES
from specstep.compile import on_disk
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.gguf.blocks import kept_weights
from specstep.compile.gguf.file import read_gguf
from specstep.compile.on_disk import OnDisk
from specstep.compile.source import load_source


def resident() -> int:
    """Bytes of files that this process has in memory."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(found["RssFile"].split()[0]) * 1024


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> OnDisk:
    monkeypatch.setattr(on_disk, "SPARED", 0)
    monkeypatch.setattr(on_disk, "LEAST", 1)
    return OnDisk()


def test_weights_lie_on_the_disk_widened_and_packed(disk: OnDisk, tmp_path: Path) -> None:
    file = save_case(tmp_path / "tiny.gguf", CASES["llama"], case_model(CASES["llama"]))
    source, plain = load_source(str(file), "bfloat16", "cpu", disk=disk), load_source(str(file), "bfloat16", "cpu")
    kept = dict(source.model.named_parameters())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(kept[name], parameter) and kept[name].data_ptr() in disk._places
        assert parameter.data_ptr() not in disk._places
    weight = source.model.lm_head.weight
    config = make_config({"drafter": "none", "max_seq_len": 64})
    packed, same = (assemble(each, config).precision(weight).make(weight) for each in (source, plain))
    assert torch.equal(packed, same) and packed.data_ptr() in disk._places and same.data_ptr() not in disk._places


def test_what_was_read_of_a_file_leaves_memory(tmp_path: Path) -> None:
    rows = np.zeros((2**15, 34 * 32), np.uint8)  # 34 MiB
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", rows, raw_dtype=Type.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, before = read_gguf(path), resident()
    assert file.tensors["weight"].data.sum() == 0 and resident() - before > 2**24
    file.release()
    assert resident() - before < 2**23
    (weight,) = kept_weights(path)
    before = resident()
    for at in range(0, len(rows), 4096):
        weight.read(slice(at, at + 4096))
    assert resident() - before < 2**24

"""Files that we write have the modes that the umask says, whatever the libraries do that write them."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from specstep.compile.swap import replace, work_folder
from specstep.compile.tensors_file import save_tensors


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_file_of_tensors_has_the_mode_of_a_new_file(umask, tmp_path):
    for _ in range(2):
        save_tensors({"a": torch.ones(3)}, tmp_path / "weights.safetensors")
        assert mode(tmp_path / "weights.safetensors") == 0o666 & ~umask
    assert load_file(tmp_path / "weights.safetensors")["a"].tolist() == [1, 1, 1]


def test_an_engine_directory_has_the_mode_of_a_new_folder(umask, tmp_path):
    for _ in range(2):
        with work_folder(tmp_path / "engine") as work:
            replace(work, tmp_path / "engine")
        assert mode(tmp_path / "engine") == 0o777 & ~umask


def test_every_file_of_an_engine_has_the_mode_of_a_new_file(engine_folder, tmp_path):
    (tmp_path / "new").touch()
    assert {mode(path) for path in engine_folder.iterdir()} == {mode(tmp_path / "new")}

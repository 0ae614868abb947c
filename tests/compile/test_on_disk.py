"""Weights in a file: the same numbers, without their memory."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from specstep.compile import on_disk
from specstep.compile.on_disk import LEAST, OnDisk


@pytest.fixture(autouse=True)
def spare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks of tests may be small."""
    monkeypatch.setattr(on_disk, "SPARED", 0)


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_a_tensor_is_kept_with_its_numbers(dtype, monkeypatch):
    monkeypatch.setattr(on_disk, "COPIED", 1000)
    disk, given = OnDisk(), [torch.randint(0, 99, (300, size), dtype=torch.uint8).to(dtype) for size in (257, 400)]
    kept = [disk.keep(tensor) for tensor in (*given, given[1].T)]
    for held, tensor in zip(kept, (*given, given[1].T), strict=True):
        assert torch.equal(held, tensor) and held.is_contiguous() and held.data_ptr() != tensor.data_ptr()
        disk.release(held)
        assert torch.equal(held, tensor)
    kept[0][7] = 5
    disk.release_all()
    assert (kept[0][7] == 5).all() and torch.equal(kept[0][8:], given[0][8:])


def test_what_is_released_takes_no_memory_until_it_is_read():
    disk, ones = OnDisk(), torch.ones(64, 2**20, dtype=torch.uint8)
    before = resident()
    held = disk.keep(ones)
    assert resident() - before < 2**24
    assert held.sum() == 2**26 and resident() - before > 2**25
    disk.release(held)
    assert resident() - before < 2**24


def test_what_is_small_or_there_already_stays_where_it_is():
    disk, small = OnDisk(), torch.ones(LEAST // 4 - 1)
    assert disk.keep(small) is small
    held = disk.keep(torch.ones(LEAST))
    assert disk.keep(held) is held
    disk.release(small)  # nothing is lost of what lies elsewhere
    assert (small == 1).all()


def test_a_part_of_a_kept_tensor_is_released_with_no_other():
    disk, other = OnDisk(), torch.ones(LEAST)
    held = disk.keep(torch.arange(2 * LEAST))
    disk.release(held[LEAST:])
    disk.release(other)
    assert torch.equal(held, torch.arange(2 * LEAST)) and (other == 1).all()


def test_a_full_disk_leaves_tensors_in_memory(monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensor = torch.ones(LEAST)
    assert OnDisk().keep(tensor) is tensor


def test_a_disk_that_is_nearly_full_is_left_to_the_engine(monkeypatch):
    free = [3 * 4 * LEAST]
    monkeypatch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=free[0], f_frsize=1))
    disk, tensors = OnDisk(), [torch.full((LEAST,), float(number)) for number in range(4)]
    kept = [disk.keep(tensor) for tensor in tensors]
    moved = [held is not tensor for held, tensor in zip(kept, tensors, strict=True)]
    assert moved == [True, True, True, False], "each needs its own room and that of those before it"
    free[0] = 2**40
    assert disk.keep(tensors[3]) is tensors[3], "what once was full is not asked again"
    for held, tensor in zip(kept, tensors, strict=True):
        assert torch.equal(held, tensor)


@pytest.mark.parametrize("mapped", [LEAST, 10 * LEAST, 2**30])
def test_many_tensors_open_few_files(mapped, monkeypatch):
    monkeypatch.setattr(on_disk, "MAPPED", mapped)
    before, disk = len(os.listdir("/proc/self/fd")), OnDisk()
    tensors = [torch.full((LEAST // 4 + 100 * number,), float(number)) for number in range(40)]
    kept = [disk.keep(tensor) for tensor in tensors]
    most = 1 + sum(tensor.nbytes // LEAST + 1 for tensor in tensors) * LEAST // mapped + 1
    assert len(os.listdir("/proc/self/fd")) - before <= most
    for number, held in enumerate(kept):
        disk.release(held)
        held += 1
        assert (held == number + 1).all()
    disk.release_all()
    assert all((held == number + 1).all() for number, held in enumerate(kept))


def test_what_was_kept_outlives_the_build():
    with OnDisk() as disk:
        held = disk.keep(torch.arange(LEAST))
    assert torch.equal(held, torch.arange(LEAST))
    other = torch.ones(LEAST)
    assert disk.keep(other) is other
    disk.release(held)
    disk.release_all()


def test_a_cache_that_cannot_be_written_does_too(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tensor = torch.ones(LEAST)
    assert OnDisk().keep(tensor) is tensor


def test_no_file_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    held = OnDisk().keep(torch.ones(LEAST))
    assert (held == 1).all() and not list((tmp_path / "specstep").iterdir())


@torch.no_grad()
def test_a_module_that_ran_leaves_no_weights_in_memory():
    disk, layers = OnDisk(), torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    for layer in layers:
        layer.weight.data = disk.keep(torch.ones(2048, 2048))
    x, before = torch.ones(1, 2048), resident()
    expected = x * 2048.0**4
    with disk.read_in_turn():
        assert torch.equal(layers(x), expected)
    assert resident() - before < 2**25
    assert torch.equal(layers(x), expected)
    assert resident() - before > 2**25

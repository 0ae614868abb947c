"""Where ranks meet: memory and cores, or GPUs and a name."""

import os
import pickle

import pytest
import specstep
import torch
from specstep.kernels.communicator import make_shared_memory
from specstep.kernels.native import load_library
from specstep.runtime.ranks import places
from specstep.runtime.ranks.places import CorePlace, GpuPlace, gpus_of_ranks


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(names)`: a machine with these."""

    def there(names):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: names[gpu])

    return there


def test_ranks_are_on_gpus_behind_each_other(gpus):
    gpus(["H200"] * 4)
    assert gpus_of_ranks(0, 4) == [0, 1, 2, 3] and gpus_of_ranks(1, 2) == [1, 2]


@pytest.mark.parametrize(("first", "count", "got"), [(0, 1, 1), (1, 2, 1), (3, 2, 0)])
def test_too_few_gpus_are_refused(gpus, first, count, got):
    gpus(["H200"] * count)
    message = f"device: expected 2 GPUs from cuda:{first} on, one for each rank, got {got}"
    with pytest.raises(specstep.InputError, match=message):
        gpus_of_ranks(first, 2)


def test_gpus_of_two_kinds_are_refused(gpus):
    gpus(["H200", "H100", "H200"])
    with pytest.raises(specstep.InputError, match="device: expected 2 GPUs of one kind, got H100 and H200"):
        gpus_of_ranks(0, 2)


def test_a_place_on_a_gpu_is_joined_there(monkeypatch):
    entered, joined = [], []
    monkeypatch.setattr(torch.cuda, "set_device", entered.append)
    monkeypatch.setattr(places, "NcclCommunicator", lambda *arguments: joined.append(arguments))
    place = pickle.loads(pickle.dumps(GpuPlace(b"name", 3)))
    place.enter()
    place.join(1, 2)
    assert entered == [3] and joined == [(b"name", 1, 2)] and place.files == ()


def test_a_place_on_cores_is_the_memory_that_is_shared():
    load_library()
    memory = make_shared_memory(1)
    place = pickle.loads(pickle.dumps(CorePlace(memory, frozenset())))
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    place.enter()  # on any
    assert before is None or os.sched_getaffinity(0) == before
    communicator = place.join(0, 1)
    os.close(memory)
    assert communicator.joined and place.files == (memory,)
    communicator.leave()
    assert not communicator.joined

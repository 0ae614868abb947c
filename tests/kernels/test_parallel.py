"""How our C++ kernels share work between threads."""

from collections.abc import Iterator

import pytest
import torch
from specstep.kernels.linear.op import packed_linear
from specstep.kernels.linear.packing import pack


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def test_every_thread_flushes_denormals_as_the_caller_does(two_threads: None, as_before: None) -> None:
    """A helper begins with what its creator had, and stays: the caller's has changed since."""
    x, packed = torch.randn(64, 512), pack(torch.randn(512, 512) * 1e-38)

    def run() -> torch.Tensor:
        return packed_linear(x, packed, None, 512)

    kept = run()
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that flushes denormals")
    torch.set_num_threads(1)
    flushed = run()
    torch.set_num_threads(2)
    assert not torch.equal(flushed, kept)  # so that this test can fail
    assert all(torch.equal(run(), flushed) for _ in range(50))
    torch.set_flush_denormal(False)
    assert all(torch.equal(run(), kept) for _ in range(50))

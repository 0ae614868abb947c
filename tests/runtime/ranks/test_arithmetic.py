"""How all ranks of an engine round."""

import pytest
import torch
from specstep.runtime.ranks.arithmetic import Arithmetic, arithmetic, compute_with


@pytest.fixture(autouse=True)
def as_before():
    before = arithmetic()
    yield
    compute_with(before)


def test_what_one_process_is_told_another_can_be_told():
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that flushes denormals")
    for chosen in (
        Arithmetic(False, ("tf32", "bf16"), (False, True, True, True), False),
        Arithmetic(True, ("ieee", "ieee"), (True, True, False, False), True),
    ):
        compute_with(chosen)
        assert arithmetic() == chosen


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    ],
)
def test_what_a_user_chose_is_read_in_whichever_way(choose):
    """One of PyTorch's two ways to ask raises an error once the other was used to choose."""
    choose()
    assert arithmetic().float32[0] == "tf32"

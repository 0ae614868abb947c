"""How all ranks of an engine compute."""

import pytest
import torch
from specstep.runtime.ranks.arithmetic import Arithmetic, arithmetic, compute_with


@pytest.fixture(autouse=True)
def as_before():
    before = arithmetic()
    yield
    compute_with(before)


@pytest.mark.parametrize("flush", [False, True])
def test_what_one_process_is_told_another_can_be_told(flush):
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that flushes denormals")
    for chosen in (Arithmetic(flush, "medium", False, True), Arithmetic(not flush, "highest", True, False)):
        compute_with(chosen)
        assert arithmetic() == chosen
        assert torch.get_float32_matmul_precision() == chosen.float32_products

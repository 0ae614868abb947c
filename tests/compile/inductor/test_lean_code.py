"""Less code is generated, in less time; PyTorch is as it was afterwards."""

import zipfile

from specstep.compile.inductor.lean_code import rules_made_once
from specstep.compile.inductor.settings import FEW_PAIRS, UNCHECKED, known
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler


def test_settings_that_this_pytorch_lacks_are_left_out():
    settings = UNCHECKED | FEW_PAIRS
    assert known(settings | {"nobody.knows": 1}) == known(settings) != {}


def test_generated_code_does_not_check_its_inputs(engine_folder):
    for name in ("prefill", "step"):
        with zipfile.ZipFile(engine_folder / f"{name}.pt2") as package:
            code = next(package.read(file).decode() for file in package.namelist() if file.endswith(".wrapper.cpp"))
        assert "::run_impl(" in code and "void check_input_" not in code


def test_rules_are_made_at_the_first_use(monkeypatch):
    made = []
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", lambda handler: made.append(handler))
    with rules_made_once():
        assert made == []
        for _ in range(3):
            DtypePropagationOpsHandler()
        assert len(made) == 1
    DtypePropagationOpsHandler()
    assert len(made) == 2

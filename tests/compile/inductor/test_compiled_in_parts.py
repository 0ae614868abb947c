"""A program's parts are compiled at the same time; the program is the same, and an error is one of the build."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specstep.compile.inductor import compiled_in_parts, programs
from specstep.compile.inductor.compiled_in_parts import KERNEL, LONG, halves
from specstep.compile.inductor.programs import compile_programs
from specstep.errors import BuildError
from torch import Tensor, nn


class Sums(nn.Module):
    """Several kernels."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = (x.sin() @ x.t()).softmax(0) @ x
        return x.sum(), (y.cos() @ x.t()).cumsum(0), x.sort(1).values


@given(lengths=st.lists(st.integers(1, LONG), max_size=12))
def test_halves_are_all_kernels_in_their_order(lengths):
    kernels = "// first\n" + "".join(KERNEL + "k" * length for length in lengths)
    first, second = halves(kernels)
    assert first + second == kernels
    assert second == "" or second.startswith(KERNEL)
    if len(kernels) < LONG:
        assert second == ""
    else:
        assert abs(len(first) - len(second)) <= max(lengths) + len(KERNEL) + 10


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What compiles a module."""
    monkeypatch.setattr(programs, "find_program", lambda key, path: False)
    monkeypatch.setattr(programs, "keep_program", lambda key, path: None)
    x = torch.randn(5, 4)

    def compile_it(name):
        with torch.no_grad():
            compile_programs({name: torch.export.export(Sums(), (x,))}, tmp_path, "cpu")
        loader = torch._C._aoti.AOTIModelPackageLoader(str(tmp_path / f"{name}.pt2"), "model", True, 1, -1)
        return loader.run([x])

    return compile_it


def test_a_program_in_two_halves_computes_the_same(compiled, monkeypatch):
    whole = compiled("whole")
    made = []
    monkeypatch.setattr(compiled_in_parts, "LONG", 0)
    monkeypatch.setattr(
        compiled_in_parts, "halves", lambda kernels: made.append(halves(kernels)) or check(halves(kernels))
    )
    for result, expected in zip(compiled("halves"), whole, strict=True):
        assert torch.equal(result, expected)


def check(parts):
    """In the process that compiles: an error there is one of the build."""
    first, second = parts
    assert first.count('extern "C"') and second.count('extern "C"')
    return parts


def test_an_error_in_a_part_is_one_of_the_build(compiled, monkeypatch):
    monkeypatch.setattr(compiled_in_parts, "halves", lambda kernels: (kernels, f"{KERNEL}int x = nobody_knows;\n"))
    with pytest.raises(BuildError, match=r"CppCompileError"):
        compiled("broken")

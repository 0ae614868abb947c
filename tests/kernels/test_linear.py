import subprocess
import sys
from pathlib import Path

import pytest
import torch
from specstep.compile.rewrites import use_small_linear
from specstep.kernels.expert_linear.op import expert_linear
from specstep.kernels.linear import reference, small_linear
from specstep.kernels.native import (
    INSTRUCTION_SETS,
    CompilerError,
    build_library,
    c_shims,
    detect_instruction_set,
    load_library,
)
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 1), (3, 5), (17, 33), (64, 64), (65, 577), (130, 1536), (7, 5001))  # N, K
# Rounding once to bfloat16 may land on the neighbour when the fp32 sums differ in their last bits.
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


class Network(nn.Module):
    """Two linears of odd sizes, one with a bias, and one whose weight is computed, which must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 75)
        self.second = nn.Linear(75, 37, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.relu(self.first(x)))
        return torch.nn.functional.linear(hidden, self.first.weight * 2)


class Mixture(Network):
    """The same, then a linear layer of each row's own expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 41, 37))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)[0]
        chosen = (hidden[:, 0] > 0).long() + (hidden[:, 1] > 0)
        return expert_linear(hidden[:, :37].contiguous(), self.experts, chosen, False)


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 7919 + columns * 31 + depth)
    shapes = ((rows, depth), (columns, depth), (columns,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight * depth**-0.5, bias


def exported(dtype: torch.dtype, kind: type[Network] = Network) -> tuple[Network, torch.export.ExportedProgram]:
    network = kind().to(dtype).eval()
    shapes = ({1: torch.export.Dim("T", min=2, max=64)},)
    return network, torch.export.export(network, (torch.randn(1, 8, 37).to(dtype),), dynamic_shapes=shapes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_reference_for_every_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for rows in range(41):
        x, weight, bias = operands(rows, *shape, dtype)
        for optional in (None, bias):
            expected = reference.small_linear(x, weight, optional)
            torch.testing.assert_close(small_linear(x, weight, optional), expected, **TOLERANCES[dtype])


def test_float32_is_as_accurate_as_aten() -> None:
    x, weight, _ = operands(16, 65, 4099, torch.float32)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    error = (small_linear(x, weight).double() - exact).abs().max()
    assert error <= 4 * (torch.nn.functional.linear(x, weight).double() - exact).abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions_and_strides(dtype: torch.dtype) -> None:
    x, weight, bias = operands(24, 65, 96, dtype)
    wide = torch.randn(2, 5, 192).to(dtype)
    strided = (x[::2], x.t().contiguous().t(), wide[..., ::2], wide.transpose(0, 1)[..., :96])
    inputs = (x.view(2, 3, 4, 96), x[0], x[:0], *strided)
    for value in inputs:
        result = small_linear(value, weight, bias)
        assert result.shape == (*value.shape[:-1], 65) and result.is_contiguous()
        torch.testing.assert_close(result, reference.small_linear(value, weight, bias), **TOLERANCES[dtype])
    unaligned = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view_as(weight)
    torch.testing.assert_close(small_linear(x, unaligned), small_linear(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64))
def test_other_dtypes_and_transposed_weights_go_to_aten(dtype: torch.dtype) -> None:
    x, weight, bias = operands(4, 65, 96, dtype)
    assert torch.equal(small_linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    x, weight, bias = operands(4, 65, 96, torch.float32)
    transposed = weight.t().contiguous().t()
    torch.testing.assert_close(small_linear(x, transposed, bias), small_linear(x, weight, bias))


def test_infinities_and_nan_pass_through() -> None:
    x = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [3e38, 3e38]]).bfloat16()
    result = small_linear(x, torch.eye(2).bfloat16())
    assert result[0, 1] == float("inf") and result[1, 0].isnan() and result[2, 0] == x[2, 0]


def test_rows_do_not_influence_one_another() -> None:
    x, weight, _ = operands(32, 65, 577, torch.bfloat16)
    whole = small_linear(x, weight)
    for rows in (3, 8, 13, 31):
        assert torch.equal(small_linear(x[:rows], weight), whole[:rows])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(RuntimeError):
        small_linear(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(RuntimeError):
        small_linear(torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("rows", (1, 8, 40))
def test_opcheck(rows: int) -> None:
    load_library()
    x, weight, bias = operands(rows, 17, 33, torch.bfloat16)
    torch.library.opcheck(torch.ops.specstep.small_linear.default, (x, weight, bias))
    torch.library.opcheck(torch.ops.specstep.small_linear.default, (x.view(1, rows, 33), weight))


def test_torch_compile() -> None:
    x, weight, bias = operands(8, 65, 96, torch.float32)
    compiled = torch.compile(lambda value: torch.relu(small_linear(value, weight, bias)), fullgraph=True)
    torch.testing.assert_close(compiled(x), torch.relu(small_linear(x, weight, bias)))


def test_pass_replaces_linears_with_stored_weights_only() -> None:
    network, program = exported(torch.float32)
    assert use_small_linear(program) == 2
    targets = [node.target for node in program.graph_module.graph.nodes]
    assert targets.count(torch.ops.specstep.small_linear.default) == 2
    assert targets.count(torch.ops.aten.linear.default) == 1
    x = torch.randn(1, 5, 37)
    torch.testing.assert_close(program.module()(x), network(x))


RUN_PACKAGE = """
import ctypes, sys, torch
library, package, data = sys.argv[1:]
ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
model = torch._inductor.aoti_load_package(package)
inputs, expected = torch.load(data)
for value, wanted in zip(inputs, expected):
    assert torch.equal(model(value), wanted)
assert not any(name.startswith("specstep") for name in sys.modules)
"""


def test_compiled_package_runs_without_python_operator(tmp_path: Path) -> None:
    _, program = exported(torch.bfloat16, Mixture)
    use_small_linear(program)
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"aot_inductor.custom_ops_to_c_shims": c_shims()},
    )
    inputs = [torch.randn(1, rows, 37).bfloat16() for rows in (2, 8, 33)]
    model = torch._inductor.aoti_load_package(package)
    expected = [model(value) for value in inputs]
    for value, result in zip(inputs, expected, strict=True):
        torch.testing.assert_close(result, program.module()(value), rtol=2**-6, atol=1e-2)
    torch.save((inputs, expected), tmp_path / "data.pt")
    # The library moves with the engine: another folder, another process, nothing of ours imported.
    library = tmp_path / "engine" / "renamed.so"
    library.parent.mkdir()
    library.write_bytes(build_library().read_bytes())
    command = [sys.executable, "-c", RUN_PACKAGE, str(library), package, str(tmp_path / "data.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)


CHECK_LIBRARY = """
import sys, torch
from pathlib import Path
from specstep.kernels.linear import reference, small_linear
from specstep.kernels.native import load_library
load_library(Path(sys.argv[1]))
for dtype in (torch.float32, torch.bfloat16):
    for rows in (1, 2, 3, 9, 32):
        for columns, depth in ((5, 7), (65, 577), (33, 1536)):
            x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).div(depth**0.5).to(dtype)
            expected = reference.small_linear(x, weight)
            torch.testing.assert_close(small_linear(x, weight), expected, rtol=2**-7, atol=1e-3)
"""


def test_narrower_instruction_sets(tmp_path: Path) -> None:
    names = list(INSTRUCTION_SETS)
    for name in names[names.index(detect_instruction_set()) + 1 :]:
        library = build_library(instruction_set=name)
        subprocess.run([sys.executable, "-c", CHECK_LIBRARY, str(library)], check=True)


def test_build_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="instruction_set: expected one of avx512_bf16"):
        build_library(instruction_set="sse9")
    with pytest.raises(CompilerError, match=r"expected a C\+\+ compiler, got none of no-such-compiler; install g\+\+"):
        build_library(compiler="no-such-compiler", cache=tmp_path)


COMPILER = """#!/bin/sh
for word; do [ "$before" = -o ] && echo "a library" > "$word"; before=$word; done
"""


def test_the_library_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = build_library(compiler=str(compiler))
    assert library.is_relative_to(tmp_path / "cache" / "specstep") and library.read_text() == "a library\n"
    library.write_text("kept")
    assert build_library(compiler=str(compiler)).read_text() == "kept"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build_library(compiler=str(compiler)).is_relative_to(tmp_path / "home" / ".cache" / "specstep")


def test_tests_leave_the_users_cache_alone(shared_folder: Path) -> None:
    assert build_library().is_relative_to(shared_folder)

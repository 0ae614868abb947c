"""The PTX that TensorRT embeds: exactly the parameters it passes, and it assembles for each target."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specstep.kernels.case import Case
from specstep.kernels.plugins import PLUGINS
from specstep.kernels.ptx import parameters, smaller, visible_parameters

# Compiles every plugin at the sizes of a small model, and where a tile wants more shared memory than it may have. In a
# process of its own: others interpret Triton here.
PROGRAM = """
import json, sys
from specstep.kernels.model_sizes import ModelSizes
from specstep.kernels.plugins import PLUGINS
from specstep.kernels.ptx import compile_ptx

small = ModelSizes("float16", 64, 64, heads=9, kv_heads=3, nodes=8)
wide = ModelSizes("bfloat16", 256, 256, heads=8, nodes=33, slots=64)
latent = ModelSizes("bfloat16", 192, 128, heads=4, kv_heads=4, nodes=8)
for model, archs in ((small, sys.argv[2:]), (wide, ["90"]), (latent, ["90"])):
    for plugin in PLUGINS:
        shapes = plugin.sized(model.inputs[plugin.name], model.attributes)
        case = plugin.case(model.dtype, shapes, model.attributes)
        for arch in map(int, archs):
            binary = compile_ptx(case, arch)
            path = f"{sys.argv[1]}/{plugin.name}-{model.key_size}-{arch}.ptx"
            open(path, "w").write(binary.ptx)
            counts = [len(plugin.inputs), len(plugin.scalars(shapes)), len(plugin.outputs)]
            print(json.dumps([plugin.name, path, binary.entry, binary.shared, *counts]))
"""


@pytest.mark.slow
def test_plugins_assemble_with_the_parameters_that_tensorrt_passes(tmp_path: Path) -> None:
    architectures = [80, 90, 120]
    knobs = pytest.importorskip("triton.knobs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *map(str, architectures)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == len(PLUGINS) * (len(architectures) + 2)
    for name, path, entry, shared, inputs, scalars, outputs in lines:
        ptx = Path(path).read_text()
        kinds = [declaration.split()[1] for declaration in parameters(ptx, entry)]
        assert kinds == [".u64"] * inputs + [".u32"] * scalars + [".u64"] * outputs, name
        assert shared <= 48 * 1024, name
        target = ptx.split(".target ")[1].split()[0]
        tool = knobs.nvidia.ptxas_blackwell if target.startswith("sm_12") else knobs.nvidia.ptxas
        done = subprocess.run([tool.path, f"-arch={target}", path, "-o", os.devnull], capture_output=True, text=True)
        assert done.returncode == 0, f"{path}: {done.stderr}"


PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1,
	.param .u64 .ptr .global .align 1 kernel_param_2
)
{ ld.param.u64 %rd1, [kernel_param_0]; ret; }
"""


def test_hidden_parameters_are_taken_out() -> None:
    assert [line.split()[-1] for line in parameters(visible_parameters(PTX, "kernel", 2), "kernel")] == [
        "kernel_param_0", "kernel_param_1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "count", "message"),
    [
        ("kernel", 0, "expected 0 parameters and unused pointers, got .param .u64 .* kernel_param_0 in use"),
        ("kernel", 1, "unused pointers, got .param .u32 kernel_param_1"),
        ("kernel", 4, "expected 4 parameters, got 3"),
        ("other", 1, "other: expected an entry point of this name"),
    ],
)
def test_parameters_in_use_are_never_taken_out(entry: str, count: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        visible_parameters(PTX, entry, count)


def test_a_kernel_that_never_fits_is_refused() -> None:
    case: Any = Case("large", None, {}, {"BLOCK_R": 16, "BLOCK_S": 32}, {"num_stages": 2})
    case = smaller(case)
    assert case.options["num_stages"] == 1
    case = smaller(case)
    assert case.constants["BLOCK_S"] == 16
    with pytest.raises(RuntimeError, match="large: expected at most 49152 bytes of shared memory"):
        smaller(case)

"""The PTX that TensorRT embeds: exactly the parameters it passes, and it assembles for each target."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from specstep.kernels.ptx import parameters, visible_parameters

ARCHITECTURES = (80, 90, 120)

# Compiles every plugin at the sizes of a small model, and where a tile wants more shared memory than it may have. In a
# process of its own: others interpret Triton here.
PROGRAM = """
import json, sys
from specstep.kernels.plugin import DYNAMIC, INTEGERS, all_plugins
from specstep.kernels.ptx import compile_ptx

def shapes(b, h, kv, t, d, s):
    w, where = (t + 31) // 32, [(b,), (b, t), (b, t, (t + 31) // 32), (b, t)]
    return {
        "tree_layout": [(b, t), (b, t)],
        "cache_write": [(b, kv, s, d), (b, kv, t, 3), (b, kv, t, d)],
        "tree_attention_split": [(b, h, t, d), (b, kv, s, d), (b, kv, s, d), *where],
        "tree_attention_merge": [(8, b, h, t, d), (8, b, h, t), (h,)],
        "accept": [*[(b, t)] * 3, (b, t, w), (b, t), (b, t)],
        "compact": [(b, kv, s, d), (b,), (b, 6), (b,)],
    }

attributes = {"scale": 0.1, "window": 0, "softcap": 0.0, "max_depth": 5}
small, wide = (1, 9, 3, 8, 64, 2112), (1, 8, 1, 33, 256, 64)
for dtype, sizes, archs in (("float16", small, sys.argv[2:]), ("bfloat16", wide, ["90"])):
    for plugin in all_plugins():
        given = plugin.named(shapes(*sizes)[plugin.name])
        outputs = plugin.output_shapes(given, attributes, INTEGERS)
        every = plugin.named([*given.values(), *outputs])
        case = plugin.case(dtype, every, attributes)
        for arch in map(int, archs):
            binary = compile_ptx(case, arch)
            scalars = len(plugin.scalars(every))
            pointers = [len(plugin.inputs), len(plugin.outputs)]
            path = f"{sys.argv[1]}/{plugin.name}-{dtype}-{sizes[4]}-{arch}.ptx"
            open(path, "w").write(binary.ptx)
            print(json.dumps([plugin.name, path, binary.entry, binary.shared, pointers[0], scalars, pointers[1]]))
"""


def test_plugins_assemble_with_the_parameters_that_tensorrt_passes(tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *map(str, ARCHITECTURES)]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == 6 * (len(ARCHITECTURES) + 1)
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
    from specstep.kernels import plugin_ptx
    from specstep.kernels.compile_cubin import Case

    case: Any = Case("large", None, {}, {"BLOCK_R": 16, "BLOCK_S": 32}, {"num_stages": 2})
    smaller = plugin_ptx.smaller(case)
    assert smaller.options["num_stages"] == 1
    smaller = plugin_ptx.smaller(smaller)
    assert smaller.constants["BLOCK_S"] == 16
    with pytest.raises(RuntimeError, match="large: expected at most 49152 bytes of shared memory"):
        plugin_ptx.smaller(smaller)

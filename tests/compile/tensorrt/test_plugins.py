"""Ahead-of-time plugins: TensorRT's own Python layer takes our registrations, and gets the right launches from them."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from specstep.kernels.plugins import PLUGINS


def test_tensorrt_takes_every_plugin(tmp_path: Path) -> None:
    if find_spec("tensorrt_bindings") is None or shutil.which("cc") is None:
        pytest.skip("needs the wheel tensorrt-cu13-bindings and a C compiler")
    pytest.importorskip("triton")
    from tensorrt_aot import MODEL

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "tensorrt_aot.py"), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]  # TensorRT logs there too
    lines = {line["name"]: line for line in printed}
    assert list(lines) == [plugin.name for plugin in PLUGINS]
    for plugin in PLUGINS:
        line, shapes = lines[plugin.name], plugin.sized(MODEL.inputs[plugin.name], MODEL.attributes)
        assert line["outputs"] == [list(shapes[name]) for name in plugin.outputs]
        names = {"int64": "INT64", "int32": "INT32", "float32": "FLOAT", "float": "BF16"}
        assert line["dtypes"] == [names[kind] for kind in plugin.outputs.values()]
        assert line["aliases"] == {str(i): plugin.aliases.get(i, -1) for i in range(len(plugin.outputs))}
        assert line["scalars"] == plugin.scalars(shapes)
        assert line["parameters"] == len(plugin.inputs) + len(plugin.outputs) + len(line["scalars"])
        launch = line["launch"]
        blocks = {"BLOCK_R": 32, "BLOCK_T": 32, "BLOCK_N": 8}  # of these sizes
        assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == plugin.grid(shapes, blocks)
        assert launch["block_x"] in (32, 128, 256) and launch["block_y"] == launch["block_z"] == 1

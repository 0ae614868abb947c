"""Every Triton kernel compiles to machine code for each target, without a GPU, and keeps its values in registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from specstep.kernels.plugins import PLUGINS

ARCHITECTURES = (80, 90, 120)


@pytest.mark.slow
def test_every_kernel_compiles_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "specstep.kernels.compile_cubin", "--out", str(tmp_path / "cubins"), "--arch"]
    command += map(str, ARCHITECTURES)
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    rows = re.findall(r"^\| (.+?) \| sm_(\d+) \| (\d+) \| (\d+) \| (\d+) \|$", run.stdout, flags=re.MULTILINE)
    for kernel in (*(plugin.name for plugin in PLUGINS), "compact float16 D=128 x8", "linear_attention", "fold", "wkv"):
        assert {int(arch) for name, arch, *_ in rows if name.startswith(kernel)} == set(ARCHITECTURES), kernel
    assert [row for row in rows if int(row[3]) > 0] == []
    # sm_120 has the least shared memory per block of the three, 99 KiB.
    assert [row for row in rows if int(row[4]) > 99 * 1024] == []
    cubins = list((tmp_path / "cubins").glob("*.cubin"))
    assert len(cubins) == len(rows)
    assert all(cubin.read_bytes().startswith(b"\x7fELF") for cubin in cubins)


def test_interpreted_kernels_are_refused() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "specstep.kernels.compile_cubin", "--arch", "90"]
    run = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "TRITON_INTERPRET: expected unset" in run.stderr

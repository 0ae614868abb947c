"""The CUDA programs of engines, lowered on a machine without a GPU (`fake_cuda.py`): traced for any number of rows,
nodes and tokens, scheduled and written by Inductor, every kernel compiled to machine code."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from models import save_eagle3

LAYERS = 3
DYNAMIC = {"drafter": "{head}", "tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3}
CASES = [  # drafter, rows, dtype, compute capability, the most launches of a step besides those of its layers
    ({"drafter": "none"}, 1, "bfloat16", 120, 20),
    ({"drafter": "ngram"}, 4, "bfloat16", 80, 60),
    (DYNAMIC, 8, "float32", 90, 125),
]
PER_LAYER = 10  # norm, QKV, rope and cache write, attention and its merge, output, norm, gate and up, product, down


def lowered(folder, options, arch):
    """What `fake_cuda.py` says of an engine, in a process that Triton's interpreter is off in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    script = Path(__file__).parent.parent / "fake_cuda.py"
    run = subprocess.run(
        [sys.executable, str(script), "Llama", json.dumps(options), str(arch)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "assuming every input is mutated" not in run.stderr, "a kernel that the compiler cannot read: it copies all"
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rows", "dtype", "arch", "rest"), CASES, ids=lambda value: str(value)[:24])
def test_programs_become_code_that_launches_little_and_copies_no_cache(drafter, rows, dtype, arch, rest, tmp_path):
    pytest.importorskip("triton")
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    sizes = {"dtype": dtype, "max_batch": rows, "max_seq_len": 192, "prefill_chunk": 16}
    options = drafter | {"drafter": drafter["drafter"].format(head=save_eagle3(tmp_path))} | sizes
    found = lowered(tmp_path, options, arch)
    assert set(found) == {"step", "prefill"}
    for name, program in found.items():
        assert program["kernels"] > 10
        caches = [shape for shape in program["allocated"] if re.search(r"64\*s\d+, \d+\)$", shape)]
        assert caches == [], f"{name}: a copy of a whole cache"
    launches = found["step"]["launches"]
    layers = [place for place, name in enumerate(launches) if name.startswith("attend_split_kernel")][:LAYERS]
    assert {after - before for before, after in pairwise(layers)} == {PER_LAYER}
    assert len(launches) - LAYERS * PER_LAYER <= rest
    print(f"{options['drafter']}: {PER_LAYER} a layer, {len(launches) - LAYERS * PER_LAYER} besides")

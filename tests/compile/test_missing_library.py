"""A build on a machine whose compiler does not build our kernels: PyTorch's take their place, and it says so."""

import subprocess
import sys

import pytest
import specstep
from models import greedy, save_model
from specstep.commands.describe import describe
from specstep.runtime.engine_file import read_manifest
from transformers import AutoModelForCausalLM

BUILD = """
import sys
import specstep
from specstep.kernels import native

def build_library(*arguments):
    raise native.CompilerError("compiler: g++ failed\\nwith a page of reasons")

native.build_library = build_library
specstep.build(sys.argv[1], sys.argv[2], progress=print, drafter="ngram", dtype=sys.argv[3], weights=sys.argv[4],
               max_seq_len=96, prefill_chunk=32)
"""


def build(model: str, output: str, dtype: str, weights: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD, model, output, dtype, weights]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_engine_without_our_kernels_says_what_transformers_says(tmp_path):
    model = str(save_model(tmp_path / "model"))
    done = build(model, str(tmp_path / "engine"), "float32", "auto")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: drafts may change a text: our C++ kernels cannot be built (compiler: g++ failed); PyTorch's are "
        "used, which are slower"
    ]
    assert "drafts      may change the text: our C++ kernels cannot" in describe(read_manifest(tmp_path / "engine"))
    prompt = [40, 41, 42] * 9
    with specstep.load(tmp_path / "engine", nodes="all") as engine:
        result = engine.generate(prompt, 40, ignore_eos=True)
    assert result.token_ids == greedy(AutoModelForCausalLM.from_pretrained(model), prompt, 40)
    assert result.stats["steps"] < 40


def test_quantised_weights_need_our_kernels(tmp_path):
    model = str(save_model(tmp_path / "model"))
    done = build(model, str(tmp_path / "engine"), "bfloat16", "int8")
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith(
        "weights: expected auto or bfloat16 where our C++ kernels cannot be built, got int8: compiler: g++ failed"
    )

"""What `py.typed` promises: a user's own code passes `mypy --strict` against the installed package."""

import re
import subprocess
import sys

import pytest
from installed import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BEYOND = re.compile(
    r"^(import openai|from specstep\.serving)", re.MULTILINE
)  # more than what is installed: run instead
OVERLOADS = """
from collections.abc import Sequence
from pathlib import Path
from typing import assert_type

import specstep

engine = specstep.load("engine")
assert_type(engine, specstep.Engine)
assert_type(specstep.build("model", "engine", dtype="float32"), Path)
assert_type(specstep.jit("model"), specstep.Engine)

ids: list[int] = [1, 2]
messages = [{"role": "user", "content": "Hello"}]
assert_type(engine.generate("text"), specstep.Generation)
assert_type(engine.generate([1, 2, 3]), specstep.Generation)
assert_type(engine.generate(ids), specstep.Generation)
assert_type(engine.generate((1, 2)), specstep.Generation)
assert_type(engine.generate(messages), specstep.Generation)
assert_type(engine.generate([{"role": "user", "content": "Hello"}]), specstep.Generation)
assert_type(engine.generate(["one", "two"]), list[specstep.Generation])
assert_type(engine.generate([ids, ids]), list[specstep.Generation])
assert_type(engine.generate([messages, messages]), list[specstep.Generation])
assert_type(engine.generate([[1, 5, 7], "or text"], max_new_tokens=32), list[specstep.Generation])
params = specstep.SamplingParams(temperature=0.5, stop="end", logit_bias={5: 1.0})
result = engine.generate("text", sampling=params)
assert_type(result, specstep.Generation)
assert_type(result.choices, list[specstep.Generation])
assert_type(result.logprobs, list[specstep.TokenLogprobs] | None)
assert_type(engine.generate(["one", "two"], sampling=[params, {"n": 2}]), list[specstep.Generation])
assert_type(engine.generate(["one", "two"], sampling="model"), list[specstep.Generation])
for piece in engine.stream("text", chat=True):
    assert_type(piece, str)
with engine as opened:
    assert_type(opened, specstep.Engine)
"""
MISTAKES = """
import specstep

engine = specstep.load("engine")
engine.generate("text", max_new_token=5)
engine.generate(5)
engine.generate("text", temperature=0.5)
engine.generate("text", sampling="modal")
specstep.SamplingParams(0.5)
specstep.build("model", "engine", colour="red")
specstep.lode("engine")
"""


@pytest.fixture(scope="module")
def mypy(environment, tmp_path_factory):
    """Check sources, by file name, as a user of the installed package would -> mypy's lines.

    Where only the base requirements are installed: types of transformers, which is large, are not read.
    """
    cache = tmp_path_factory.mktemp("mypy")

    def check(folder, files):
        for name, source in files.items():
            (folder / name).write_text(source)
        options = ("--strict", "--no-error-summary", "--hide-error-context", "--cache-dir", cache, "--config-file", "")
        command = [sys.executable, "-m", "mypy", *options, "--python-executable", environment / "python", *files]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.stderr == "" and done.returncode in (0, 1), done.stdout + done.stderr
        return done.stdout.splitlines()

    return check


def test_examples_of_the_documentation(mypy, tmp_path):
    blocks = {f"{page.stem}_{at}.py": text for page in PAGES for at, text in enumerate(BLOCK.findall(page.read_text()))}
    blocks = {name: text for name, text in blocks.items() if not BEYOND.search(text)}  # tests/serving runs those
    assert any(name.startswith("README") for name in blocks)
    assert mypy(tmp_path, {name.replace("-", "_"): text for name, text in blocks.items()}) == []


def test_what_calls_return(mypy, tmp_path):
    assert mypy(tmp_path, {"overloads.py": OVERLOADS}) == []


def test_mistakes_are_found(mypy, tmp_path):
    found = {int(line.split(":")[1]) for line in mypy(tmp_path, {"mistakes.py": MISTAKES}) if " error: " in line}
    assert found == set(range(5, 12))

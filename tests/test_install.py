"""`pip install .` in an environment of its own: engines run there without what building them takes."""

import json
import os
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import specstep
from installed import FOLDERS, ROOT
from packaging.requirements import Requirement

HEAVY = ("transformers", "gguf", "accelerate", "onnx", "onnxscript", "onnxruntime", "polygraphy", "tensorrt")


def run(environment: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, out of sight of this one and of the sources."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    program = [environment / arguments[0], *arguments[1:]]
    return subprocess.run(program, capture_output=True, text=True, env=clean, cwd=environment, check=False)


def test_the_wheel_carries_every_package_and_all_data(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    kept = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()} | set(
        ROOT.glob("*.py")
    )
    expected = {str(Path("specstep") / path.relative_to(ROOT)) for path in kept if path.suffix != ".pyc"}
    assert expected | {"specstep/py.typed"} == {name for name in inside if name.startswith("specstep/")}


def test_base_requirements_are_those_of_running():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {Requirement(text).name for text in declared}
    assert names == {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}


def test_what_building_takes_is_not_there(environment):
    program = f"from importlib.util import find_spec; print([name for name in {HEAVY} if find_spec(name)])"
    done = run(environment, "python", "-c", program)
    assert done.stdout.strip() == "[]", done.stderr
    where = run(environment, "python", "-c", "import specstep; print(specstep.__file__)")
    assert str(environment.parent) in where.stdout, "the package of the sources, not the installed one"


def test_an_engine_generates_with_the_base_requirements(environment, engine_folder):
    options = ("--prompt", "hello", "--max-new-tokens", "12", "--ignore-eos", "--raw", "--json")
    done = run(environment, "specstep", "generate", engine_folder, *options)
    progress = re.compile(r"specstep: \d+:\d\d \S")  # said after two seconds, which a busy machine takes
    said = [line for line in done.stderr.splitlines() if not progress.match(line)]
    assert done.returncode == 0 and not said, done.stderr
    expected = specstep.load(engine_folder).generate("hello", max_new_tokens=12, ignore_eos=True)
    assert json.loads(done.stdout)["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["build", "smollm2-135m", "-o", "engine"], "build"),
        (["build", "smollm2-135m", "-o", "engine", "--backend", "onnx"], "build"),
        (["collect", "smollm2-135m", "-o", "data", "--tokens", "9"], "build"),
        (["count", "data", "-o", "tables", "--model", "smollm2-135m"], "build"),
        (["train-drafter", "smollm2-135m", "data", "-o", "head"], "build"),
        (["tune", "smollm2-135m"], "build"),
        (["serve", "engine"], "serve"),
        (["check", "engine"], "polygraphy"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_commands_name_the_extra_that_is_missing(arguments, extra, environment):
    done = run(environment, "specstep", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "which is not installed" in done.stderr and f"pip install 'specstep[{extra}]'" in done.stderr


@pytest.mark.parametrize("name", ["build", "jit", "eager"])
def test_python_names_the_extra_that_is_missing(name, environment):
    done = run(environment, "python", "-c", f"import specstep; specstep.{name}")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "MissingPackageError" in last and "pip install 'specstep[build]'" in last

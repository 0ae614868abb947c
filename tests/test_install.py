"""`pip install .` in an environment of its own: engines run there without what building them takes."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
import specstep
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = sorted({name.split(".")[1] for name in SETUPTOOLS["packages"] if "." in name})
HEAVY = ("transformers", "gguf", "accelerate", "onnx", "onnxscript", "onnxruntime", "polygraphy", "tensorrt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources: a build leaves files beside them."""
    sources, wheels = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    for path in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed"))):
        shutil.copy(path, sources)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", wheels)
    subprocess.run([sys.executable, "-m", "pip", "wheel", sources, *options], check=True)
    return next(wheels.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """The folder of the programs of a fresh environment: the wheel, and what its base requirements bring."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    into = ("--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    subprocess.run([sys.executable, "-m", "pip", *into], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for needed in closure(metadata(wheel).get_all("Requires-Dist")):
        link(needed, packages)
    return python.parent


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def closure(requirements: list[str]) -> list[Distribution]:
    """What pip would install for the requirements, extras of their own included, as it is installed here."""
    found: dict[tuple[str, str], Distribution] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key not in found:
                found[key] = distribution(requirement.name)
                waiting += [(Requirement(text), wanted) for text in found[key].requires or ()]
    return list({id(needed): needed for needed in found.values()}.values())


def link(needed: Distribution, packages: Path) -> None:
    """Make the files of a distribution importable in another environment."""
    for file in needed.files or ():
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue
        place = packages / file
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(Path(str(needed.locate_file(file))).resolve())


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
    assert done.returncode == 0 and done.stderr == ""
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

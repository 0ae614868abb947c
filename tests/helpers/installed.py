"""The package as `pip install .` leaves it, in an environment of its own, without a network."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = sorted({name.split(".")[1] for name in SETUPTOOLS["packages"] if "." in name})


def build_wheel(folder: Path) -> None:
    """The wheel, into a folder, of a copy of the sources there: a build leaves files beside them."""
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for path in (*ROOT.glob("*.py"), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "py.typed"))):
        shutil.copy(path, sources)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", sources, *options], check=True)


def make_environment(wheel: Path, folder: Path) -> None:
    """A fresh environment with the wheel and what its base requirements bring."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    into = ("--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    subprocess.run([sys.executable, "-m", "pip", *into], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for needed in closure(metadata(wheel).get_all("Requires-Dist") or []):
        link(needed, packages)


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

"""The map of the code holds: imports run one way, the package list is the tree, the import is light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("commands", "graphs", "kernels", "compile", "runtime", "serving", "train")
SHARED = {
    "errors",
    "user_cache",
    "report",
    "controls",
    "backends",
    "progress",
    "processor",
}  # at the root: every folder may import them
MAY_IMPORT = {
    "commands": {"commands", "compile", "kept_engines", "model_engines", "runtime", "serving", "train"},
    "graphs": {"graphs", "kernels"},
    "kernels": {"kernels"},
    "compile": {"compile", "graphs", "kernels", "runtime"},
    "runtime": {"runtime", "kernels"},
    "serving": {"serving", "runtime"},
    "train": {"train", "compile", "graphs", "kernels", "runtime"},
}
TRAIN_MAY_IMPORT = {  # the parts of train/, in the order of the pipeline
    "data": {"data"},
    "collect": {"collect", "data"},
    "count": {"data"},
    "drafter": {"drafter", "data"},
    "tune": {"tune"},
}
NEVER = {"runtime": {"transformers", "onnx", "torch._dynamo", "torch._inductor"}, "kernels": {"transformers"}}
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> list[str]:
    """Absolute names of all that a file imports, wherever in it."""
    package = path.relative_to(ROOT).parts[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            head = ".".join((*(("specstep", *base) if node.level else ()), *((node.module,) if node.module else ())))
            found += [head, *(f"{head}.{alias.name}" for alias in node.names)]
    return found


def module_graph() -> dict[Path, set[Path]]:
    """Which of our files each of them imports, wherever in it."""
    files = [*SOURCES, *ROOT.glob("*.py")]
    named = {".".join(("specstep", *path.relative_to(ROOT).with_suffix("").parts)): path for path in files}
    named = {name.removesuffix(".__init__"): path for name, path in named.items()}
    graph = {}
    for path in files:
        found = imports(path)
        # `from .x import y` names x and x.y: what is meant is the module y, where there is one.
        found = [name for name in found if not any(other.startswith(f"{name}.") and other in named for other in found)]
        graph[path] = {named[name] for name in found if name in named} - {path}
    return graph


def test_no_module_imports_itself_through_others():
    """Not by an import in a function, either."""
    graph = module_graph()
    left = dict(graph)
    while free := [path for path, needed in left.items() if not needed & set(left)]:
        for path in free:
            del left[path]
    while ends := [path for path in left if not any(path in needed for needed in left.values())]:
        for path in ends:  # what leads to a circle is not in it
            del left[path]
    assert not {str(path.relative_to(ROOT)) for path in left}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "specstep" and len(parts) > 1:
            assert parts[1] in MAY_IMPORT[folder] | SHARED, f"{folder} imports {name}"
        assert not any(name == heavy or name.startswith(heavy + ".") for heavy in NEVER.get(folder, ())), name
        assert parts[0] not in FOLDERS, f"import {name} relatively"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.is_relative_to(ROOT / "train")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_parts_of_train_share_only_the_data(path):
    part = path.relative_to(ROOT / "train").with_suffix("").parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[:2] == ["specstep", "train"] and len(parts) > 2:
            assert parts[2] in TRAIN_MAY_IMPORT[part], f"{part} imports {name}"


def mapped_files() -> dict[str, str]:
    """path -> phrase, of the map in CONTRIBUTING.md. Indentation says which folder a line belongs to."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## The map")[1].split("Imports run one way")[0]
    found, folders = {}, {}
    for line in section.splitlines():
        depth = (len(line) - len(line.lstrip()) - 4) // 2
        name, _, phrase = line.strip().partition(" ")
        if not name or depth < 0:
            continue
        folders = {level: folder for level, folder in folders.items() if level < depth}
        path = "".join(folders.values()) + name
        if name.endswith("/"):
            folders[depth] = name
        found[path] = phrase.strip()
    return found


def test_the_map_gives_every_file_a_phrase():
    """Files of an op have one for all ops; a command is named by `specstep --help`."""
    mapped = mapped_files()
    from specstep.cli import COMMANDS

    commands = {f"commands/{name.replace('-', '_')}.py" for name in COMMANDS}
    missing = []
    for path in [*SOURCES, *ROOT.glob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        if path.parent.parent == ROOT / "kernels":
            name = f"kernels/OP/{path.name}"
        if path.name != "__init__.py" and name not in commands and not mapped.get(name):
            missing.append(name)
    assert not missing
    gone = [name for name in mapped if name.endswith(".py") and "OP/" not in name and not (ROOT / name).is_file()]
    assert not gone


def own_test(module: Path) -> Path:
    """Where the tests of a module lie if it has its own, those of an op's files in one."""
    of_op = module.parent.parent == ROOT / "kernels"
    name = module.parent.relative_to(ROOT) if of_op else module.relative_to(ROOT).with_suffix("")
    return ROOT / "tests" / name.parent / f"test_{name.name}.py"


def test_every_module_has_tests_or_says_where():
    rows = [line.split("|")[1:3] for line in (ROOT / "tests" / "README.md").read_text().splitlines() if "| " in line]
    through = {module.strip(): tests.strip().split(", ") for module, tests in rows if ".py" in module}
    for module, tests in through.items():
        assert (ROOT / module).is_file(), f"tests/README.md: {module} is gone"
        assert not own_test(ROOT / module).is_file(), f"tests/README.md: {module} has tests of its own"
        assert all((ROOT / "tests" / test).is_file() for test in tests), f"tests/README.md: {module}: {tests}"
    ops = [path for path in SOURCES if path.parent.parent == ROOT / "kernels" and path.name == "op.py"]
    modules = [path for path in SOURCES if path.parent.parent != ROOT / "kernels" and path.name != "__init__.py"]
    missing = [path for path in [*ops, *modules] if not own_test(path).is_file()]
    assert {path.relative_to(ROOT).as_posix() for path in missing} <= set(through)


def test_packages_in_pyproject_are_the_tree():
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent.relative_to(ROOT) for path in SOURCES if path.name == "__init__.py"}
    assert declared == {"specstep"} | {"specstep." + ".".join(folder.parts) for folder in folders}
    assert {path.parent for path in SOURCES} == {ROOT / folder for folder in folders}, "a folder without __init__.py"


def test_files_beside_the_code_are_packaged():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = set()
    for package, patterns in declared.items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        packaged |= {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    ignored = {".py", ".pyc"}
    found = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {path for path in found if path.suffix not in ignored} <= packaged


def test_import_is_light_and_names_are_real():
    program = """
import sys, specstep, specstep.cli
specstep.cli.parser()
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
for name in specstep.__all__:
    assert getattr(specstep, name) is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_names_are_an_attribute_error():
    import specstep

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = specstep.nonsense


def test_the_checkout_may_have_any_name(request):
    """pytest would import a package by the name of its folder, which a hyphen makes no name in Python."""
    assert not any(isinstance(node, pytest.Package) for node in request.node.listchain())

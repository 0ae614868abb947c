"""Print the longest files and functions of the package, so that they stay short."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("graphs", "kernels", "compile", "runtime", "serving", "train", "commands")


def main() -> None:
    """Ten of each, longest first."""
    paths = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    files = sorted(((len(path.read_text().splitlines()), path) for path in paths), reverse=True)
    functions = sorted(
        (
            (node.end_lineno or 0) - node.lineno + 1,
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name}",
        )
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    print("longest files")
    for length, path in files[:10]:
        print(f"  {length:5} {path.relative_to(ROOT)}")
    print("longest functions")
    for length, name in functions[:-11:-1]:
        print(f"  {length:5} {name}")


if __name__ == "__main__":
    main()

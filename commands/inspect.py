"""`specstep inspect`."""

import argparse
from pathlib import Path

from ..errors import InputError

HELP = "show what an engine is made of"
EXAMPLES = """examples:
  specstep inspect engines/smol
  specstep inspect engines/smol --svg step.svg"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engine", metavar="DIR", help="engine directory")
    add("--json", action="store_true", help="print the manifest")
    add("--svg", metavar="FILE", help="draw the tree and the step's stages")


def run(options: argparse.Namespace) -> int:
    from ..runtime.engine_file import check_files, read_manifest
    from .describe import describe
    from .tree_svg import draw

    manifest = read_manifest(options.engine)
    check_files(Path(options.engine), manifest, deep=False)
    print(manifest.to_json() if options.json else describe(manifest))
    if options.svg:
        try:
            Path(options.svg).write_text(draw(manifest.about["tree"], manifest.about["stages"]))
        except OSError as error:
            raise InputError(f"svg: expected a path that can be written, got {options.svg}: {error.strerror}") from None
    return 0

"""`specstep inspect`."""

import argparse
from pathlib import Path

from .files import write
from .terminal import say

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
    say(manifest.to_json() if options.json else describe(manifest))
    if options.svg:
        write(options.svg, draw(manifest.about["tree"], manifest.about["stages"]))
    return 0

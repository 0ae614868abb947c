"""`specstep check`."""

import argparse

from ..errors import InputError, needs_extra
from .progress import Progress
from .terminal import say

HELP = "compare engines' steps with torch, through polygraphy"
EXAMPLES = """examples:
  specstep check engines/onnx
  specstep check engines/onnx engines/tensorrt  # both of one dtype
  specstep check engines/onnx --steps 32 --save report"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engines", metavar="DIR", nargs="+", help="engine directories of one configuration, of any backends")
    add("--model", metavar="MODEL", help="what the engines were built from (default: what the first manifest says)")
    add("--drafter", metavar="NAME", help="their drafter (default: what the first manifest says)")
    add("--steps", type=int, metavar="N", default=8, help="steps of a generation to compare (default: 8)")
    add("--save", metavar="FOLDER", help="write inputs and outputs as polygraphy JSON, for a bug report")


def run(options: argparse.Namespace) -> int:
    if options.steps < 1:
        raise InputError(f"steps: expected at least 1, got {options.steps}")
    with needs_extra("polygraphy", "check"):
        from ..compile.check import compare  # imports torch, onnx, onnxruntime and polygraphy

    with Progress() as progress:
        result = compare(options.engines, options.model, options.drafter, options.steps, options.save, progress)
    for worst in result.worst:
        say(
            f"{worst.runners[0]} and {worst.runners[1]}: worst output {worst.name} at {list(worst.place)} of step "
            f"{worst.step}: {worst.expected:g} and {worst.got:g}, off by {worst.error:.2g}"
        )
    say(f"{result.steps} steps: {'all outputs agree' if result.agree else 'OUTPUTS DIFFER'}")
    return 0 if result.agree else 1

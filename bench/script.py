"""What the scripts of this folder do alike: threads, progress, and errors in one line."""

import os
import sys
from collections.abc import Callable


def run_script(name: str, threads: int, run: Callable[[Callable[[str], None]], None]) -> int:
    """Call run(report), which measures and writes -> exit status: 0; 2 for bad input, with one line; 130 when
    interrupted. threads: of OpenMP, here and in every process that is started."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before anything loads OpenMP
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from specstep.commands.progress import Progress
    from specstep.errors import SpecstepError

    try:
        with Progress() as report:
            run(report)
    except SpecstepError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0

"""What the scripts of this folder do alike: threads, progress, errors in one line, and results that grow."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_script(name: str, threads: int, run: Callable[[Callable[[str], None]], None]) -> int:
    """Call run(report), which measures and writes -> exit status: 0; 2 for bad input, with one line; 130 when
    interrupted. threads: of OpenMP, here and in every process that is started."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before anything loads OpenMP
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from specstep.commands.progress import Progress
    from specstep.errors import SpecstepError

    try:
        with Progress() as progress:
            run(progress)
    except SpecstepError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return 0


def write_json(path: Path, result: Any) -> None:
    """Write a result, again and again as it grows: whoever is killed meanwhile leaves the last one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)

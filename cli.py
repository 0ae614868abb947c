"""The command line: `specstep COMMAND`."""

import argparse
import atexit
import os
import sys
import threading
from collections.abc import Sequence

from .commands import (
    bench_acceptance,
    build,
    cache,
    chat,
    check,
    collect,
    count,
    export_triton,
    generate,
    inspect,
    profile,
    serve,
    train_drafter,
    tune,
)
from .commands.terminal import complain, end_at_second_interrupt, take_any_text
from .errors import SpecstepError

LOST = 120  # Python's status of a process whose output did not arrive
COMMANDS = {
    "build": build,
    "generate": generate,
    "chat": chat,
    "bench-acceptance": bench_acceptance,
    "cache": cache,
    "check": check,
    "collect": collect,
    "count": count,
    "export-triton": export_triton,
    "inspect": inspect,
    "profile": profile,
    "serve": serve,
    "train-drafter": train_drafter,
    "tune": tune,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command -> exit status: 0; 1 where `check` found a difference; 2 for bad input (one line on standard error
    says which); 130 when interrupted; a second Ctrl-C ends it at once."""
    options = parser().parse_args(arguments)
    take_any_text()
    end_at_second_interrupt()
    try:
        return options.run(options)
    except SpecstepError as error:
        complain(str(error))
        return 2
    except BrokenPipeError:  # the reader went away, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        complain("interrupted")
        return 130


def run_command() -> None:
    """The installed command: `main`, and the end of the process. What a process holds is not taken apart first, as
    Python does: a second for a model and its graphs."""
    status = main()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader went away
            continue
        except OSError:  # no space, say
            status = status or LOST
    os._exit(status)


def parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    whole = argparse.ArgumentParser(prog="specstep", description="Speculative decoding as a compiled artifact.")
    added = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = added.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(one)
        one.set_defaults(run=command.run)
    return whole

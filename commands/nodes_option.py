"""The option `--nodes` of what runs an engine."""

import argparse


def add_nodes_option(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    """Add it."""
    parser.add_argument(
        "--nodes",
        metavar="N",
        default=default,
        help="drafted tokens that a step verifies: a number, all, or auto, which chooses before each step what is "
        f"fastest here; no text depends on it (default: {default})",
    )


def given_nodes(options: argparse.Namespace) -> int | str:
    """What `load` takes."""
    given: str = options.nodes
    return int(given) if given.removeprefix("-").isdecimal() else given

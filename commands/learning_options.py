"""The options of engines that learn from what they write."""

import argparse
from pathlib import Path
from typing import TypedDict


class Learning(TypedDict):
    """The learning arguments of `load`."""

    learning: bool
    learned: Path | None


def add_learning_options(parser: argparse._ActionsContainer) -> None:
    """--learned and --no-learning."""
    parser.add_argument(
        "--learned", metavar="FILE", type=Path, help="what the n-gram drafter learned: the engine starts from the file "
        "if it is there, and writes it at the end"
    )  # fmt: skip
    parser.add_argument(
        "--no-learning", action="store_true", help="do not count what is written: how fast later texts come "
        "would hint at it"
    )  # fmt: skip


def given_learning(options: argparse.Namespace) -> Learning:
    """What they say."""
    return {"learning": not options.no_learning, "learned": options.learned}

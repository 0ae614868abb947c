"""The option `--device` of what runs an engine."""

import argparse


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add it."""
    parser.add_argument(
        "--device", metavar="cuda:N", help="which GPU an engine that was built for GPUs runs on (default: the first)"
    )

"""A pytest plugin: the outcome of each test as a line of JSON, written when the test ends.

pytest -p pytest_lines --lines FILE. A run that is killed leaves what it did; pytest's own reports come at the end.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file."""
    parser.addoption("--lines", type=Path, help="write each test's outcome to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Write in the one process that hears of all tests: not in xdist's workers."""
    if config.getoption("--lines") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(config.getoption("--lines")))


class Lines:
    """Appends to the file. A test counts once: with its call, or with what kept it from one, or failed behind it."""

    def __init__(self, path: Path):
        self.path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A setup or a teardown that passed says nothing."""
        if report.when == "call" or not report.passed:
            self._write({
                "name": report.nodeid,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
                "said": _said(report),
                "properties": dict(report.user_properties),
            })  # fmt: skip

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure."""
        if report.failed:
            self._write({
                "name": report.nodeid, "outcome": "failed", "seconds": 0.0, "said": _last_line(report.longreprtext),
                "properties": {},
            })  # fmt: skip

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _said(report: pytest.TestReport) -> str:
    """Why a test was skipped, or what it failed with."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else _last_line(report.longreprtext)


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[::-1]), "")

"""The table of kept keywords: each outcome from cases of our own."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import json_schema_suite as suite

CASES = [
    {"description": "a", "schema": {"type": "integer"}, "tests": [(1, True), ("x", False), (1.0, True)]},
    {"description": "b", "schema": {"unevaluatedItems": False}, "tests": [([], True)]},
    {"description": "c", "schema": {"properties": {"a": {}, "b": {}}}, "tests": [({"b": 1, "a": 2}, True)]},
]


@pytest.fixture
def folder(tmp_path):
    groups = [
        each | {"tests": [{"description": "t", "data": data, "valid": valid} for data, valid in each["tests"]]}
        for each in CASES
    ]
    (tmp_path / "own.json").write_text(json.dumps(groups))
    return tmp_path


def test_each_case_has_its_outcome(folder):
    assert [outcome for _, outcome, _ in suite.results(folder)] == ["kept", "kept", "narrower", "refused", "kept"]


def test_a_forbidden_document_that_is_taken_is_wrong(folder, monkeypatch, capsys):
    monkeypatch.setattr(suite.Schemas, "takes", lambda *_: True)
    monkeypatch.setattr("sys.argv", ["suite", str(folder)])
    assert suite.main() == 1
    assert capsys.readouterr().out.splitlines()[2:] == ["| own | 3 | 0 | 1 | 1 |"]

"""The script that has an engine write documents of MaskBench's schemas."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from bench_structured import Written
from maskbench import chosen, holds, main, measure

SCHEMA = {"enum": ["ab", "ba"]}


@pytest.mark.parametrize(("text", "kind"), [('"ab"', "valid"), ('"cc"', "invalid"), ('"a', "cut"), ("", "cut")])
def test_a_document_is_held_to_its_schema(text, kind):
    assert holds(SCHEMA, Written(1, 1.0, 1, text)) == kind
    assert holds({"$ref": "elsewhere.json"}, Written(1, 1.0, 1, "{}")) == "unchecked"


@pytest.fixture
def data(tmp_path):
    """Schemas as MaskBench has them, one of which is refused and one too long."""
    schemas = {f"s{number}": SCHEMA for number in range(3)} | {"odd": {"contains": {}}, "long": {"title": "x" * 9000}}
    for name, schema in schemas.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"schema": schema, "tests": []}))
    return tmp_path


def test_schemas_are_chosen_by_a_seed(data):
    names = [name for name, _ in chosen(data, 4, 1)]
    assert names == [name for name, _ in chosen(data, 4, 1)] and len(set(names)) == 4
    assert sorted(name for name, _ in chosen(data, 9, 1)) == ["long", "odd", "s0", "s1", "s2"]


def test_documents_are_written_and_counted(engine_folder, data, tmp_path, monkeypatch):
    monkeypatch.setattr("maskbench.LONGEST", 200)
    monkeypatch.setattr("maskbench.ASKS", "")
    found = measure(str(engine_folder), chosen(data, 5, 0), 100, lambda line: None)
    assert found["documents"] == {"valid": 3, "too long": 1} and found["invalid"] == []
    assert len(found["refused"]) == 1 and found["refused"][0].startswith("odd: structured: expected a grammar")
    assert set(found["ways"]) == {"fitted", "as they come"}
    assert found["ways"]["fitted"]["tokens_per_step"] > 1


def test_a_folder_that_has_no_engine_is_bad_input(data, tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(data)]) == 2
    assert capsys.readouterr().err.startswith("maskbench: ")

"""bench/random_gguf.py: files that are read as the shapes that they are said to have."""

import sys
from pathlib import Path

import pytest
from specstep.compile.source import load_source

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import random_gguf

SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("name", sorted(random_gguf.SHAPES))
def test_a_file_has_its_shape(name, tmp_path, monkeypatch):
    like, changes, keys = random_gguf.SHAPES[name]
    monkeypatch.setitem(random_gguf.SHAPES, name, (like, changes | SMALL, keys))
    path = tmp_path / "files" / "model.gguf"
    random_gguf.write(name, "q8_0", path, lambda line: None)
    config = load_source(str(path), "float32", "cpu").model.config
    for field, value in (changes | SMALL).items():
        if field not in ("rope_parameters", "norm_eps"):  # floats of 32 bits
            assert getattr(config, field) == value, field
    assert [each.name for each in (tmp_path / "files").iterdir()] == ["model.gguf"]

"""Answers of a real model's engine, judged and timed: on a CPU, with a tiny one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from models import tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu_text
from side_by_side.questions import Question


def test_an_engine_s_answers_are_its_model_s_own(engine_folder, model_folder, tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--questions", "2", "--max-new-tokens", "6", "--nodes", "0", "all", "--rows", "1", "2"]
    assert (
        gpu_text.main([str(engine_folder), "--model", str(model_folder), "--device", "cpu", *sizes, "--out", str(out)])
        == 0
    )
    result = json.loads(out.read_text())
    assert [*result["engines"]] == ["0 nodes, 1 rows", "0 nodes, 2 rows", "all nodes, 1 rows", "all nodes, 2 rows"]
    for found in result["engines"].values():
        assert found["behind"] < 1e-3 and found["parted"] == 0 and found["tokens_per_s"] > 0
    assert result["engines"]["0 nodes, 1 rows"]["tokens_per_step"] == 1 and result["generate"]["token_ms"] > 0


def test_a_token_that_is_not_the_model_s_is_seen():
    model, question = tiny_model("Llama"), Question("a", "b", [40, 41, 42])
    right = int(model(torch.tensor([question.tokens])).logits[0, -1].argmax())
    assert gpu_text.judged(model, [question], [[right]]) == {"behind": 0.0, "own_choice": 1.0}
    wrong = gpu_text.judged(model, [question], [[(right + 1) % 320]])
    assert wrong["behind"] > gpu_text.NEAR and wrong["own_choice"] == 0.0
    assert gpu_text.parted({"one": [[1], [2]], "other": [[1], [3]]}, "other") == {"parted": 1}


def test_token_times_are_of_all_answers_at_once():
    assert gpu_text._each([1.0, 2.0], [3, 4, 5], 2) == [(1.0, 7), (2.0, 5)]
    with pytest.raises(ValueError):
        gpu_text._each([1.0], [3, 4, 5], 2)

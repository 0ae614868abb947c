"""`bench-acceptance`: its figures by their definition, and the command on a compiled engine."""

import importlib.util
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specstep.cli import main
from specstep.commands import bench_acceptance
from specstep.report import AcceptedNode
from specstep.runtime.acceptance import Acceptance
from specstep.runtime.asked.request import Request

nodes = st.builds(AcceptedNode, st.integers(1, 6), st.integers(0, 3))
paths = st.lists(st.lists(nodes, max_size=4, unique_by=lambda node: node.node).map(tuple), min_size=1, max_size=20)


@given(paths, st.integers(0, 7), st.integers(0, 5), st.integers(1, 4))
def test_figures_by_their_definition(steps, most_nodes, most_depth, most_rank):
    requests = []
    for step in steps:  # a request for each step: what they say adds up
        requests.append(Request([1], 9, [], tokens=[0] * (1 + len(step)), paths=Counter([step])))
    acceptance, count = Acceptance.of(requests), len(steps)
    accepted = [node for step in steps for node in step]
    assert acceptance.steps == count
    assert acceptance.tokens_per_step == pytest.approx(1 + len(accepted) / count)
    deepest = max(map(len, steps))
    reached = [sum(len(step) >= depth for step in steps) / count for depth in range(1, deepest + 1)]
    assert acceptance.by_depth() == pytest.approx(reached)
    last = max((node.node for node in accepted), default=0)
    used = [sum(node.node == place for node in accepted) / count for place in range(1, last + 1)]
    assert acceptance.by_node() == pytest.approx(used)
    worst = max((node.rank for node in accepted), default=-1)
    chosen = [sum(node.rank == rank for node in accepted) / len(accepted) for rank in range(worst + 1)]
    assert acceptance.by_rank() == pytest.approx(chosen)
    kept = 0
    for step in steps:
        for node in step[:most_depth]:
            if node.node > most_nodes or node.rank >= most_rank:
                break
            kept += 1
    assert acceptance.with_tree(most_nodes, most_depth, most_rank) == pytest.approx(1 + kept / count)


@pytest.fixture
def questions(tmp_path):
    lines = [
        {"id": 1, "category": "chat", "turns": ["hello hello hello", "and again"]},
        {"category": "math", "prompt": "1 1 1 1"},
        {"token_ids": [5, 6, 7, 5, 6, 7, 5]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_command_prints_a_table_and_writes_json_and_png(engine_folder, questions, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = ["bench-acceptance", str(engine_folder), "--prompts", str(questions), "--max-new-tokens", "90"]
    assert main([*command, "--json", str(tmp_path / "a.json"), "--png", str(tmp_path / "a.png")]) == 0
    table = capsys.readouterr().out
    for word in ("all", "chat", "math", "tokens per step", "depth", "node", "choice"):
        assert word in table
    figures = json.loads((tmp_path / "a.json").read_text())
    assert (figures["temperature"], figures["seed"]) == (0.0, 0)
    assert figures["drafter"] == "ngram" and set(figures["groups"]) == {"all", "chat", "math"}
    assert figures["groups"]["all"]["requests"] == 3 and figures["groups"]["chat"]["requests"] == 1
    assert set(figures["groups"]["math"]["nodes_course"]) == {7}, "all are verified"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_nodes_that_are_chosen_are_told(engine_folder, questions, tmp_path, capsys):
    command = ["bench-acceptance", str(engine_folder), "--prompts", str(questions), "--max-new-tokens", "40"]
    assert main([*command, "--nodes", "auto", "--json", str(tmp_path / "a.json")]) == 0
    assert "drafted tokens verified per step, and share of steps: " in capsys.readouterr().out
    course = json.loads((tmp_path / "a.json").read_text())["groups"]["all"]["nodes_course"]
    assert course and all(0 <= mean <= 7 for mean in course)
    assert main([*command, "--nodes", "2", "--json", str(tmp_path / "a.json")]) == 0
    assert set(json.loads((tmp_path / "a.json").read_text())["groups"]["chat"]["nodes_course"]) == {0, 2}
    assert main([*command, "--nodes", "9"]) == 2
    assert "nodes: expected auto, all, or 0 to the 7 that this engine drafts, got 9" in capsys.readouterr().err


def test_prompts_are_sampled_with_seeds_of_their_own(engine_folder, questions, tmp_path, monkeypatch):
    requests, real = [], bench_acceptance.run_all
    monkeypatch.setattr(bench_acceptance, "run_all", lambda engine, made: (requests.extend(made), real(engine, made)))
    file = tmp_path / "a.json"
    command = ["bench-acceptance", str(engine_folder), "--prompts", str(questions), "--max-new-tokens", "9"]
    assert main([*command, "--temperature", "0.75", "--seed", "7", "--json", str(file)]) == 0
    assert [request.seed for _, request in requests] == [7, 8, 9]
    assert all(request.controls["sampling"][0] == 0.75 for _, request in requests)
    figures = json.loads(file.read_text())
    assert (figures["temperature"], figures["seed"]) == (0.75, 7)


def test_mistakes_are_named(engine_folder, questions, tmp_path, capsys, monkeypatch):
    command = ["bench-acceptance", str(engine_folder), "--prompts"]
    (tmp_path / "bad.jsonl").write_text('{"prompt": ""}\n')
    assert main([*command, str(questions), "--temperature", "-1"]) == 2
    assert "temperature: expected 0 or a number from 0.01 to 100, got -1.0" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "bad.jsonl")]) == 2
    assert "expected at least one that the engine can take" in capsys.readouterr().err
    assert main([*command, str(questions), "--max-new-tokens", "2", "--json", "/proc/nothing/a.json"]) == 2
    assert "expected a path that can be written" in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main([*command, str(questions), "--png", "a.png"]) == 2
    assert 'pip install "specstep[plot]"' in capsys.readouterr().err

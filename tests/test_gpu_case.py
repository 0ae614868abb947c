"""What `make gpu-check` asks of engines on a GPU, asked of one on a CPU; and that it would notice what is wrong."""

import pytest
import torch
from gpu_case import PROMPTS, check_engine, counted, expected_answers, flips
from models import tiny_model


@pytest.fixture(scope="module")
def expected():
    return expected_answers("Llama")


def test_an_engine_is_checked_plainly_and_replayed(engine_folder, expected):
    told = check_engine(engine_folder, expected, batches=(1, 2))
    assert told["replays"] == 0 and told["accepted"] > 0
    wrong = [[*expected[0][:-1], expected[0][-1] + 1], *expected[1:]]
    with pytest.raises(AssertionError, match="plain calls"):
        check_engine(engine_folder, wrong, batches=(1, 2))


def test_steps_and_replays_of_graphs_are_counted(monkeypatch):
    class Session:
        def begin_step(self, nodes):
            torch.cuda.CUDAGraph.replay(self)
            return nodes

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: None)
    session = Session()
    with counted(session) as calls:
        assert session.begin_step(3) == 3
        torch.cuda.CUDAGraph.replay(session)
    session.begin_step(3)
    assert (calls.steps, calls.replays) == (1, 2)


@torch.no_grad()
def test_flips_are_where_answers_part_with_the_gap_of_their_logits(expected):
    model = tiny_model("Llama")
    assert flips(model, expected, expected) == []
    logits = model(torch.tensor([PROMPTS[1] + expected[1][:7]])).logits[0, -1]
    likeliest = logits.topk(2)
    other = expected[1][:7] + [likeliest.indices[1].item()] + [5] * 9
    [found] = flips(model, expected, [expected[0], other, *expected[2:]])
    assert (found["prompt"], found["place"]) == (1, 7)
    gap = float((likeliest.values[0] - likeliest.values[1]) / logits.std())
    assert found["gap"] == pytest.approx(gap, abs=1e-3) and gap > 0
    with pytest.raises(AssertionError, match="goes on where the other ended"):
        flips(model, expected, [expected[0][:-1], *expected[1:]])

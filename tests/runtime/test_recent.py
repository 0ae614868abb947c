"""What is kept for the sizes of steps is bounded, whatever sizes a service sees."""

import dataclasses

import torch
from fake_session import FakeSession
from specstep.runtime import onnx
from specstep.runtime.engine_file import ProgramSpec
from specstep.runtime.inductor import torch_session
from specstep.runtime.inductor.torch_session import TorchSession
from specstep.runtime.load import load
from specstep.runtime.recent import Recent


def test_the_least_recently_used_makes_room():
    made, recent = [], Recent(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(key, lambda key=key: made.append(key) or 10 * key) == 10 * key
    assert made == [1, 2, 3, 2] and len(recent) == 2
    recent.clear()
    assert len(recent) == 0


def test_steps_of_many_sizes_are_not_all_kept():
    """A service of 16 rows of 8,000 tokens has some 100,000 sizes of steps, and kept 40 KiB for each."""
    spec = FakeSession(16).spec
    step = ProgramSpec("", ("lengths", "nodes", "catch_up", "own"), ("report",))
    spec = dataclasses.replace(spec, config={"nodes": 15, "depth": 3}, step=step)
    seen = []
    session = TorchSession(
        spec, lambda inputs: [], lambda inputs: (seen.append(inputs[3].shape), [torch.ones(1, 1)])[1]
    )
    sizes = [(rows, slots, nodes, 0) for rows in (1, 16) for slots in range(1, 61) for nodes in range(16)]
    for rows, slots, nodes, catch_up in sizes:
        session.replay(rows, slots, nodes, catch_up)
    assert seen == [(rows, 1, slots, 1) for rows, slots, _, _ in sizes]
    assert len(session._replays) == torch_session.MOST_SIZES < len(sizes)


def test_onnx_bindings_are_not_all_kept(onnx_folder, monkeypatch):
    expected = load(onnx_folder, nodes="all").generate([5, 6, 7], 40).token_ids
    monkeypatch.setattr(onnx, "MOST_SIZES", 2)
    with load(onnx_folder, nodes="all") as engine:
        session = engine.session
        row, tokens = session.admit([5, 6, 7], 43, engine.spec.stop_ids), []
        while len(tokens) < len(expected):
            tokens += session.step(len(tokens) % (1 + engine.spec.nodes))[row].tokens
        assert tokens == expected and len(session._bindings) == 2

"""What rows emit, by the cases."""

import torch
from specstep.graphs.emit import emit
from specstep.report import FREE, FULL, RUNNING, STOPPED


def row_state(**changes):
    state = {"lengths": 10, "limits": 100, "finish": RUNNING, "stop_ids": [-1, -1]} | changes
    return {name: torch.tensor([value]) for name, value in state.items()}


def test_emit_cuts_at_stop_limit_and_state():
    path, choice = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[7, 8, 9, 6]])
    cases = [
        ({}, 2, [7, 8, 9], RUNNING),
        ({}, 0, [7], RUNNING),
        ({"stop_ids": [8, -1]}, 3, [7, 8], STOPPED),
        ({"stop_ids": [6, -1]}, 2, [7, 8, 9], RUNNING),  # the stop lies past the accepted path
        ({"limits": 13}, 3, [7, 8], FULL),
        ({"limits": 14}, 2, [7, 8, 9], FULL),
        ({"limits": 13, "stop_ids": [8, -1]}, 3, [7, 8], STOPPED),
        ({"limits": 12, "stop_ids": [8, -1]}, 3, [7], FULL),
        ({"finish": FREE}, 3, [], FREE),
        ({"finish": STOPPED}, 3, [], STOPPED),
    ]
    for changes, accepted, expected, code in cases:
        tokens, count, finish = emit(row_state(**changes), path, torch.tensor([accepted]), choice)
        assert tokens[0, : count[0]].tolist() == expected, changes
        assert finish.item() == code, changes

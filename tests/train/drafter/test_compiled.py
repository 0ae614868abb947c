"""Training as a user runs it, compiled: other tests of training leave that out."""

import json

import pytest
import torch
from models import save_model
from specstep.train.drafter.options import KIND_NAMES
from specstep.train.drafter.train import train_drafter

GIVEN = {
    "levels": 2,
    "epochs": 1,
    "draft_vocab_size": 300,
    "batch": 2,
    "width": 32,
    "held_out": 0.2,
    "dtype": "float32",
}


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_training_is_the_plain_one(backend, kind, tmp_path, monkeypatch):
    """aot_eager traces as inductor does, and writes no code."""
    target, data = save_model(tmp_path / "target"), tmp_path / "said.jsonl"
    tokens = torch.randint(2, 320, (24, 42), generator=torch.Generator().manual_seed(3)).tolist()
    data.write_text("".join(json.dumps({"prompt_token_ids": t[:2], "token_ids": t[2:]}) + "\n" for t in tokens))
    given = GIVEN | {"kind": kind, "layers": None if kind == "eagle3" else 2}
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **asked: real(function, **asked, backend=backend))
    compiled = train_drafter(str(target), [str(data)], tmp_path / "compiled", **given)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plain = train_drafter(str(target), [str(data)], tmp_path / "plain", **given)
    one, other = (
        [json.loads(line) for line in (head / "history.jsonl").read_text().splitlines()] for head in (compiled, plain)
    )
    for got, expected in zip(one, other, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=0.01)

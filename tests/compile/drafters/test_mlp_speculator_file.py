"""Files of the type mlp_speculator: tied or not, scaled or not, in parts; what does not fit is refused."""

import json

import pytest
import specstep
import torch
from models import save_model, tiny_model
from plain_eagle3 import chains
from position_heads import mlp_chain, mlp_tensors, save_mlp
from safetensors.torch import save_file

OPTIONS = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@torch.no_grad()
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("tied", [False, True, "written for each level"])
def test_drafts_are_those_of_a_plain_recomputation(tied, scale, target, tmp_path):
    tensors, model = mlp_tensors(tied=bool(tied)), tiny_model("Llama")
    named = dict(tensors)
    if tied == "written for each level":
        for name, tensor in tensors.items():
            kind, level, field = name.removeprefix("speculator.").split(".")
            for other in range(int(level) + 1, 3) if int(level) or kind != "proj" else ():
                named[f"speculator.{kind}.{other}.{field}"] = tensor.clone()
    head = save_mlp(tmp_path / "head", named, tie_weights=bool(tied), scale_input=scale)
    found = chains(specstep.eager(str(target), drafter=str(head), **OPTIONS), [None] * 4)
    assert [got for _, got in found] == [mlp_chain(tensors, model, tokens, 3, scale) for tokens, _ in found]


@torch.no_grad()
def test_weights_in_parts(target, tmp_path):
    tensors, model = mlp_tensors(), tiny_model("Llama")
    head = save_mlp(tmp_path / "head", tensors)
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, head / file)
    where = {name: file for file, part in parts.items() for name in part}
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    found = chains(specstep.eager(str(target), drafter=str(head), **OPTIONS), [None] * 4)
    assert [got for _, got in found] == [mlp_chain(tensors, model, tokens, 3) for tokens, _ in found]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, c: t.pop("speculator.ln.1.bias"), "missing ln.1.bias"),
        (lambda t, c: t.update({"speculator.extra": torch.zeros(1)}), "unexpected extra"),
        (lambda t, c: c.update(n_predict=2), "unexpected emb.2.weight"),
        (lambda t, c: c.update(tie_weights=True), "unexpected emb.1.weight"),
        (lambda t, c: c.update(inner_dim=24), r"emb.0.weight: expected \[320, 24\], got \[320, 32\]"),
        (lambda t, c: c.update(emb_dim=64), "emb_dim: expected 48, the target's hidden size, got 64"),
        (lambda t, c: c.update(vocab_size=321), "vocab_size: expected at most 320, got 321"),
        (lambda t, c: c.update(n_predict=None), "n_predict: expected a number from 1 on, got None"),
    ],
)
def test_speculators_that_do_not_fit_are_refused(damage, message, target, tmp_path):
    tensors, config = mlp_tensors(), {}
    damage(tensors, config)
    head = save_mlp(tmp_path / "head", tensors, **config)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)

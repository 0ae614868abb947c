"""PARD-2: PARD over embeddings that have a share of the target's hidden states, against a plain recomputation; exact
output whatever it drafts."""

import json
import shutil
from pathlib import Path

import pytest
import specstep
import torch
from cycle import SIZE, accepted, save_cycle, to_scores
from models import greedy, save_model, tiny_model
from pard2_model import HIDDEN, MASK, SCALE, save_pard2
from plain_eagle3 import chains, hidden_states
from specstep.compile.drafters.pard2_file import target_layers
from transformers import AutoModelForCausalLM

OPTIONS = {"dtype": "float32", "max_seq_len": 96}
CHAIN = OPTIONS | {"tree": "chain", "nodes": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target")
    save_model(folder / "small", seed=1, num_hidden_layers=2, hidden_size=32)
    torch.manual_seed(3)
    save_pard2(folder / "small", torch.randn(32, 2 * HIDDEN))
    return folder


@torch.no_grad()
def plain_chain(folder, tokens, depth, shift=1):
    """What PARD-2's own inference drafts after these tokens. shift: how many places a hidden state is ahead of the
    token that it comes with."""
    small = AutoModelForCausalLM.from_pretrained(folder / "small", dtype=torch.float32).eval()
    target = tiny_model("Llama")
    seen = hidden_states(target, tokens)
    states = torch.cat([target.model.norm(seen[3]), seen[1]], -1)
    features = torch.cat([torch.zeros(shift, 2 * HIDDEN), states])[: len(tokens)]
    features = torch.cat([features, features[-1:].expand(depth - 1, -1)])
    embedded = small.get_input_embeddings()(torch.tensor([*tokens, *[MASK] * (depth - 1)]))
    weight = torch.load(folder / "small" / "warp_model.bin")["target_proj.weight"]
    logits = small(inputs_embeds=(embedded + SCALE * features @ weight.T)[None]).logits[0]
    return logits[-depth:].argmax(-1).tolist()


@pytest.mark.parametrize("nodes", [[None] * 12, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4]], ids=["all", "any"])
@pytest.mark.parametrize("chunk", [16, 2])
def test_drafts_are_those_of_a_plain_recomputation(chunk, nodes, folder):
    """Over steps of any number of nodes, and prompts in one chunk or in several."""
    drafter = str(folder / "small")
    found = chains(specstep.eager(str(folder / "target"), drafter=drafter, prefill_chunk=chunk, **CHAIN), nodes)
    assert [got for _, got in found] == [plain_chain(folder, tokens, 4) for tokens, _ in found]
    for shift in (0, 2):  # the control: hidden states of the token beside
        assert [got for _, got in found] != [plain_chain(folder, tokens, 4, shift) for tokens, _ in found]


@pytest.mark.parametrize("older", ["pard_scale", "feat_scale"])
def test_the_factor_has_older_names(older, folder, tmp_path):
    small = Path(shutil.copytree(folder / "small", tmp_path / "small"))
    config = json.loads((small / "config.json").read_text())
    config.pop("pard2_scale", None)
    (small / "config.json").write_text(json.dumps(config | {"feat_scale": 0.01, older: SCALE}))
    engine = specstep.eager(str(folder / "target"), drafter=str(small), **CHAIN)
    assert all(got == plain_chain(folder, tokens, 4) for tokens, got in chains(engine, [None] * 6))


@pytest.mark.parametrize("mixed", ["", "ngram,"])
def test_output_equals_transformers(mixed, folder):
    prompts = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253))]
    expected = [greedy(tiny_model("Llama"), prompt, 20, [1]) for prompt in prompts]
    tree = {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3}
    drafter = mixed + str(folder / "small")
    engine = specstep.eager(str(folder / "target"), drafter=drafter, max_batch=3, **OPTIONS, **tree)
    assert [result.token_ids for result in engine.generate(prompts, 20)] == expected


def test_a_model_that_knows_only_hidden_states_is_right(tmp_path):
    """Embeddings of next to nothing: what it says of the root comes from the hidden state ahead of it."""
    folder, small = save_cycle(tmp_path / "cycle"), save_cycle(tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-5)
        model.get_output_embeddings().weight.copy_(to_scores(2))  # of the token ahead of the root
    model.save_pretrained(small)
    fields = {"pard_token": 0, "pard2_target_layers": [1], "pard2_target_dim": SIZE}
    save_pard2(small, torch.eye(SIZE), **fields)
    given = OPTIONS | {"drafter": str(small), "tree": "chain", "nodes": 1}
    assert accepted(specstep.eager(str(folder), **given)) == {1: 12}


def test_indices_are_those_of_transformers():
    """Of a target with 36 layers: the last hidden state is the one behind the final norm."""
    assert target_layers("name", [-1, -8, -16, -24], 36) == (37, 29, 21, 13)
    assert target_layers("name", [0, 35, 36], 36) == (0, 35, 37)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard2_target_layers": None}, "pard2_target_layers: expected hidden states -4 to 3 of the target, got None"),
        ({"pard2_target_layers": [-5]}, r"pard2_target_layers: expected hidden states -4 to 3 of the target, got \[-5"),
        (
            {"pard2_target_layers": [-1]},
            "pard2_target_dim: expected 48, that of what it reads, got 96",
        ),
        ({"pard2_scale": "small"}, "pard2_scale: expected a number, got 'small'"),
        ({"pard2_proj_bias": True}, "missing target_proj.bias"),
        ({"pard_token": None}, "pard_token: expected the mask token's id"),
        ({"spd_type": "pard3"}, "spd_type: expected pard, pard2 or none, got 'pard3'"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message, folder, tmp_path):
    small = save_pard2(save_model(tmp_path / "small", seed=1), torch.randn(HIDDEN, 2 * HIDDEN), **fields)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder / "target"), drafter=str(small), **OPTIONS)


def test_a_model_without_what_reads_the_target_is_refused(folder, tmp_path):
    small = save_pard2(save_model(tmp_path / "small", seed=1), torch.randn(HIDDEN, 2 * HIDDEN))
    (small / "warp_model.bin").unlink()
    with pytest.raises(
        specstep.BuildError, match=r"expected warp_model.bin, by which it reads hidden states, got none"
    ):
        specstep.eager(str(folder / "target"), drafter=str(small), **OPTIONS)

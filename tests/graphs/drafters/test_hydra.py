"""Hydra and Hydra++: drafts against a plain recomputation, exact output, and heads that are always right."""

import pytest
import specstep
import torch
from cycle import SIZE, TOKENS, accepted, save_cycle, to_scores
from hydra_heads import PREFIX, hydra_chain, hydra_tensors, save_hydra
from models import greedy, save_model, tiny_model
from plain_eagle3 import chains

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = {
    "default": {},
    "chain": {"tree": "chain", "nodes": 3},
    "static": {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    "dynamic": {"tree": "dynamic", "nodes": 11, "depth": 3, "top_k": 3},
}
CHAIN = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}
EPS = {"rms_norm_eps": 1e-5}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), **EPS)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("plus", [False, True])
def test_output_equals_transformers(plus, tree, target, tmp_path):
    model, head = tiny_model("Llama", **EPS), save_hydra(tmp_path / "head", hydra_tensors(plus))
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    for drafter in (str(head), f"ngram,{head}"):
        options = TREES[tree] | {"drafter": drafter, "dtype": "float32", "max_batch": 4, "max_seq_len": 96}
        engine = specstep.eager(str(target), **options)
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 3, 1, 2, 0, 3, 1, 1, 3, 0, 2]], ids=["all", "any"])
@pytest.mark.parametrize("plus", [False, True])
def test_drafts_are_those_of_a_plain_recomputation(plus, nodes, target, tmp_path):
    """Over many steps of any number of nodes. A hidden state one place off shows."""
    tensors, model = hydra_tensors(plus), tiny_model("Llama", **EPS)
    engine = specstep.eager(str(target), drafter=str(save_hydra(tmp_path / "head", tensors)), **CHAIN)
    found = chains(engine, nodes)
    assert [got for _, got in found] == [hydra_chain(tensors, model, tokens, 3) for tokens, _ in found]
    assert [got for _, got in found] != [hydra_chain(tensors, model, tokens, 3, off=1) for tokens, _ in found]


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("reads", ["hidden state", "last token"])
@pytest.mark.parametrize("plus", [False, True])
def test_heads_that_know_the_answer_are_always_right(plus, reads, off, tmp_path):
    """From the hidden state alone, and from the last token of the path alone. One place off, they are never right."""
    cycle = save_cycle(tmp_path / "cycle")
    tensors = {name: tensor * 0 for name, tensor in hydra_tensors(plus, layers=1, vocabulary=TOKENS).items()}
    for name in tensors:
        if name.startswith(PREFIX) and "norm" in name:
            tensors[name] = torch.ones(SIZE)
    for head in range(3):
        parts = [torch.zeros(SIZE, SIZE) for _ in range(head + 2)]
        parts[0 if reads == "hidden state" else -1] = torch.eye(SIZE)
        tensors[f"hydra_mlp.{head}.{int(plus)}.res_connection.weight"] = torch.cat(parts, 1)
        behind = off + (head + 2 if reads == "hidden state" else 1)
        tensors[f"hydra_lm_head.{head}.{'1.' if plus else ''}weight"] = to_scores(behind)
    head = save_hydra(tmp_path / "head", tensors)
    assert accepted(specstep.eager(str(cycle), drafter=str(head), **CHAIN)) == [{3: 6}, {0: 24}][off]

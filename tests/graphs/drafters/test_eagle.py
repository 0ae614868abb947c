"""Heads of EAGLE and HASS: drafts against a plain recomputation, exact output, and heads that are always right."""

import pytest
import specstep
import torch
from cycle import SIZE, accepted, save_cycle, to_axis
from eagle_heads import eagle_chain, eagle_tensors, save_authors
from models import greedy, save_model, tiny_model
from plain_eagle3 import chains

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]
CHAIN = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_output_equals_transformers(tree, target, tmp_path):
    model = tiny_model("Llama")
    head = save_authors(tmp_path / "head", eagle_tensors(model.get_input_embeddings().weight))
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    for drafter in (str(head), f"ngram,{head}"):
        engine = specstep.eager(str(target), drafter=drafter, dtype="float32", max_batch=4, max_seq_len=96, **tree)
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4, 0, 2]], ids=["all", "any"])
def test_drafts_are_those_of_a_plain_recomputation(nodes, target, tmp_path):
    """Over many steps of any number of nodes. Pairing a hidden state with the token one place on shows."""
    model = tiny_model("Llama")
    tensors = eagle_tensors(model.get_input_embeddings().weight)
    engine = specstep.eager(str(target), drafter=str(save_authors(tmp_path / "head", tensors)), **CHAIN)
    found = chains(engine, nodes)
    assert [got for _, got in found] == [eagle_chain(tensors, model, tokens, 4) for tokens, _ in found]
    assert [got for _, got in found] != [eagle_chain(tensors, model, tokens, 4, shift=0) for tokens, _ in found]


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    return save_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_a_head_that_knows_the_answer_is_always_right(reads, cycle, tmp_path):
    """From the token alone, and from the hidden state alone. One that is a place off is never right."""
    found = []
    for off in (0, 1):
        tensors = {name: tensor * 0 for name, tensor in eagle_tensors(torch.eye(40, SIZE), bias=False).items()}
        tensors["embed_tokens.weight"] = torch.eye(40, SIZE)
        nothing = torch.zeros(SIZE, SIZE)
        halves = [to_axis(off), nothing] if reads == "token" else [nothing, to_axis(1 + off)]
        tensors["fc.weight"] = torch.cat(halves, 1)
        head = save_authors(tmp_path / f"head-{off}", tensors, bias=False)
        found.append(accepted(specstep.eager(str(cycle), drafter=str(head), **CHAIN)))
    assert found == [{4: 5}, {0: 24}]

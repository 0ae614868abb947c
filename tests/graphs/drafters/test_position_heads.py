"""Medusa and mlp_speculator: drafts against a plain recomputation, exact output, and heads that are always right."""

import json

import pytest
import specstep
import torch
from cycle import SIZE, TOKENS, accepted, save_cycle, to_scores
from models import greedy, save_model, tiny_model
from plain_eagle3 import chains
from position_heads import medusa_chain, medusa_tensors, mlp_chain, mlp_tensors, save_medusa, save_mlp
from specstep.compile.assemble import assemble
from specstep.compile.config import EngineConfig
from specstep.compile.jit import run_plain
from specstep.compile.source import load_source
from specstep.report import CHEAP, WHOLE

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = {
    "default": {},
    "chain": {"tree": "chain", "nodes": 3},
    "static": {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    "dynamic": {"tree": "dynamic", "nodes": 11, "depth": 3, "top_k": 3},
}
CHAIN = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}
HEADS = {
    "medusa": (lambda folder: save_medusa(folder, medusa_tensors()), medusa_tensors(), medusa_chain),
    "mlp_speculator": (lambda folder: save_mlp(folder, mlp_tensors()), mlp_tensors(), mlp_chain),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", HEADS)
def test_output_equals_transformers(kind, tree, target, tmp_path):
    model, head = tiny_model("Llama"), HEADS[kind][0](tmp_path / "head")
    expected = [greedy(model, prompt, 30, [1]) for prompt in PROMPTS]
    for drafter in (str(head), f"ngram,{head}"):
        options = TREES[tree] | {"drafter": drafter, "dtype": "float32", "max_batch": 4, "max_seq_len": 96}
        engine = specstep.eager(str(target), **options)
        assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 20, [0, 0, 0, 3, 1, 2, 0, 3, 1, 1, 3, 0, 2]], ids=["all", "any"])
@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_those_of_a_plain_recomputation(kind, nodes, target, tmp_path):
    """Over many steps of any number of nodes. A hidden state one place off shows."""
    save, tensors, chain = HEADS[kind]
    engine = specstep.eager(str(target), drafter=str(save(tmp_path / "head")), **CHAIN)
    found, model = chains(engine, nodes), tiny_model("Llama")
    assert [got for _, got in found] == [chain(tensors, model, tokens, 3) for tokens, _ in found]
    assert [got for _, got in found] != [chain(tensors, model, tokens, 3, off=1) for tokens, _ in found]


@torch.no_grad()
def test_each_node_of_a_level_has_its_own_path(target, tmp_path):
    """The second child of the root leads to other drafts than the first; with Medusa, to the same."""
    different = {}
    for kind, (save, _, _) in HEADS.items():
        (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]]))
        options = {"dtype": "float32", "max_seq_len": 96, "tree_choices": str(tmp_path / "tree.json")}
        engine = specstep.eager(str(target), drafter=str(save(tmp_path / kind)), **options)
        trees = []
        engine.session.admit([40, 41, 42, 50, 9, 8], 60, [])
        for _ in range(12):
            engine.session.step()
            trees.append(engine.session.tree(0).tokens)
        different[kind] = any(tree[3] != tree[4] or tree[5] != tree[6] for tree in trees)
    assert different == {"medusa": False, "mlp_speculator": True}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_that_pause_compute_with_zeros_and_propose_nothing(kind, target, tmp_path):
    source = load_source(str(target), "float32", "cpu")
    head = str(HEADS[kind][0](tmp_path / "head"))
    graphs = assemble(source, EngineConfig(drafter=head, dtype="float32", max_seq_len=96))
    session, seen = run_plain(source, graphs).session, []
    for module in graphs.step.module.drafter.scorer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: seen.append(bool(given[0].any())))
    row = session.admit(PROMPTS[2], 90, [])
    for draft in (WHOLE, CHEAP, CHEAP, WHOLE):
        seen.clear()
        session.step(2, draft)
        assert set(seen) == {draft == WHOLE}
        assert any(parent >= 0 for parent in session.tree(row).parents) == (draft == WHOLE)


@pytest.fixture(scope="module")
def cycle(tmp_path_factory):
    return save_cycle(tmp_path_factory.mktemp("cycle"))


@pytest.mark.parametrize("off", [0, 1])
def test_medusa_heads_that_know_the_answer_are_always_right(off, cycle, tmp_path):
    """Head i says what comes i + 2 places behind the hidden state. One place off, it is never right."""
    tensors = {f"{head}.0.linear.weight": torch.zeros(SIZE, SIZE) for head in range(3)}
    tensors |= {f"{head}.1.weight": to_scores(head + 2 + off) for head in range(3)}
    head = save_medusa(tmp_path / "head", tensors)
    assert accepted(specstep.eager(str(cycle), drafter=str(head), **CHAIN)) == [{3: 6}, {0: 24}][off]


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_an_mlp_speculator_that_knows_the_answer_is_always_right(reads, off, cycle, tmp_path):
    """From the tokens of the path alone, and from the hidden state alone."""
    axes, nothing = torch.eye(TOKENS, SIZE), torch.zeros(SIZE, SIZE)
    tensors = {}
    for level in range(3):
        tensors |= {
            f"speculator.emb.{level}.weight": axes if reads == "token" else axes * 0,
            f"speculator.proj.{level}.weight": nothing if reads == "token" else torch.eye(SIZE),
            f"speculator.ln.{level}.weight": torch.ones(SIZE),
            f"speculator.ln.{level}.bias": torch.zeros(SIZE),
            f"speculator.head.{level}.weight": to_scores(off + (1 if reads == "token" else 2 + level)),
        }
    head = save_mlp(tmp_path / "head", tensors, inner_dim=SIZE, vocab_size=TOKENS)
    assert accepted(specstep.eager(str(cycle), drafter=str(head), **CHAIN)) == [{3: 6}, {0: 24}][off]

"""Engines of low precision say the same with drafts and without, alone and in a batch, bit for bit."""

import pytest
import specstep
import torch
from models import ARCHITECTURES, save_model
from specstep.runtime.engine_file import read_manifest

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9], [7, 300, 7, 300, 7]]


@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        ("Llama", "bfloat16"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in ARCHITECTURES if name != "Llama"),
        *(pytest.param(name, "int8", marks=pytest.mark.slow) for name in ("Llama", "GPT2", "Qwen3Moe")),
        *(pytest.param(name, "int4", marks=pytest.mark.slow) for name in ("Llama", "GptOss")),
    ],
)
def test_drafts_change_no_text(architecture, weights, tmp_path):
    # Little variance: logits are close to each other, and a last bit that differs soon changes a token.
    sizes = {} if architecture in ("GPT2", "DeepseekV3") else {"intermediate_size": 61}  # no multiple of a vector
    model = str(save_model(tmp_path / "model", architecture, initializer_range=0.1, **sizes))
    options = {"dtype": "bfloat16", "weights": weights, "max_seq_len": 160, "prefill_chunk": 32}
    drafted = specstep.build(model, str(tmp_path / "drafted"), drafter="ngram", nodes=6, max_batch=3, **options)
    kinds = read_manifest(drafted).about["weights"]
    assert (weights in kinds) and (weights == "bfloat16" or kinds[weights] > kinds.get("bfloat16", 0))
    with specstep.load(drafted, nodes=0) as engine:
        expected = [engine.generate(prompt, 90, ignore_eos=True) for prompt in PROMPTS]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with specstep.load(drafted, nodes="all") as engine:
                got = engine.generate(PROMPTS, 90, ignore_eos=True)
            assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    finally:
        torch.set_num_threads(before)
    assert sum(result.stats["steps"] for result in got) < sum(len(result.token_ids) for result in got)
    assert len({token for result in got for token in result.token_ids}) > len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_an_engine_without_a_drafter_says_the_same(weights, tmp_path):
    model = str(save_model(tmp_path / "model", "Llama", initializer_range=0.1, intermediate_size=61))
    options = {"dtype": "bfloat16", "weights": weights, "max_seq_len": 160, "prefill_chunk": 32}
    said = []
    for drafter in ("none", "ngram"):
        folder = specstep.build(model, str(tmp_path / drafter), drafter=drafter, **options)
        with specstep.load(folder, nodes="all") as engine:
            said.append([engine.generate(prompt, 90, ignore_eos=True).token_ids for prompt in PROMPTS])
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["Qwen3Moe", "DeepseekV3", "GptOss"])
def test_drafts_change_no_text_where_routers_are_deep(architecture, tmp_path):
    """Depths at which PyTorch adds one row in another order than eight, in one row, whose reductions its compiler
    writes in another way than those of several."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 2, "num_experts_per_tok": 3, "initializer_range": 0.05}
    model = str(save_model(tmp_path / "model", architecture, **sizes))
    options = {"dtype": "bfloat16", "max_seq_len": 160, "prefill_chunk": 32, "drafter": "ngram", "nodes": 6}
    drafted, said = specstep.build(model, str(tmp_path / "drafted"), **options), []
    assert read_manifest(drafted).about["drafts_may_change_text"] == []
    for nodes in (0, "all"):
        with specstep.load(drafted, nodes=nodes) as engine:
            said.append([engine.generate(prompt, 90, ignore_eos=True).token_ids for prompt in PROMPTS])
    assert said[0] == said[1]

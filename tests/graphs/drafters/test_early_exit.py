"""The target's first layers as a drafter: exact output, a perfect one, and what is refused."""

import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from transformers import AutoModelForCausalLM

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(200, 253))]
TREES = [
    {"tree": "chain", "nodes": 4},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]
OPTIONS = {"dtype": "float32", "max_batch": 2, "max_seq_len": 128, "prefill_chunk": 17}


@pytest.mark.parametrize(
    ("architecture", "tree"),
    [(name, tree) for name in ("Llama", "Gemma2", "Lfm2") for tree in TREES if name == "Llama" or tree is TREES[-1]],
    ids=str,
)
def test_text_is_that_of_plain_decoding(architecture, tree, tmp_path):
    save_model(tmp_path, architecture)
    expected = [greedy(tiny_model(architecture), prompt, 30, stop_ids=[1]) for prompt in PROMPTS]
    for drafter in ("early-exit:2", "ngram,early-exit:1"):
        with specstep.eager(str(tmp_path), drafter=drafter, **OPTIONS, **tree) as engine:
            assert [result.token_ids for result in engine.generate(PROMPTS, 30)] == expected


@pytest.mark.parametrize("silent", [True, False])
def test_layers_that_add_nothing_are_not_missed(silent, tmp_path):
    """Where the last layers leave the hidden state as it is, what the first ones say is always right."""
    model = tiny_model("Llama", num_hidden_layers=4)
    for layer in model.model.layers[2:] if silent else []:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(last.weight)
    model.save_pretrained(tmp_path)
    with specstep.eager(str(tmp_path), drafter="early-exit:2", nodes=3, **OPTIONS) as engine:
        [result] = engine.generate([[5, 6, 7]], 40, ignore_eos=True)
    assert (result.stats["accepted"] == {"0": 1, "3": result.stats["steps"] - 1}) == silent


def test_weights_are_shared(tmp_path):
    from specstep.compile.drafters.early_exit import load_early_exit
    from specstep.compile.source import load_source

    save_model(tmp_path, "Gemma2")
    source = load_source(str(tmp_path), "float32", "cpu")
    scorer = load_early_exit("early-exit:2", source)
    own = {parameter.data_ptr() for parameter in source.model.parameters()}
    assert {parameter.data_ptr() for parameter in scorer.parameters()} < own
    assert len(scorer.cache_layers()) == 2 and source.model.config.num_hidden_layers == 3
    assert len(source.model.config.layer_types) == len(source.model.model.layers) == 3


@pytest.mark.parametrize("name", ["early-exit:0", "early-exit:3", "early-exit:", "early-exit:two", "early-exit:-1"])
def test_layers_that_are_not_there_are_refused(name, tmp_path):
    save_model(tmp_path)
    with pytest.raises(specstep.BuildError, match="drafter: early-exit: expected from 1 to 2 of the target's 3 layers"):
        specstep.eager(str(tmp_path), drafter=name, **OPTIONS)


def test_a_model_without_a_list_of_layers_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(tiny_model("GPT2").config).save_pretrained(tmp_path)
    with pytest.raises(specstep.BuildError, match="early-exit: expected a model with a list of layers, got GPT2LMHead"):
        specstep.eager(str(tmp_path), drafter="early-exit:2", **OPTIONS)

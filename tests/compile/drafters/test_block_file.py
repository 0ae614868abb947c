"""Block drafters as they are published: what is read, and what is refused by the line that says it."""

import pytest
import specstep
import torch
from block_drafters import (
    DEEPSPEC,
    DFLASH,
    DFLASH2,
    DOMINO,
    DOMINO_SHIFTED,
    DSPARK,
    LAYER,
    PUBLISHED,
    SLIDING,
    SPECFORGE,
    TABLES,
    ZLAB,
    block_tensors,
    save_block,
)
from models import save_model
from plain_eagle3 import chains

pytestmark = pytest.mark.usefixtures("as_published")

OPTIONS = {"dtype": "float32", "max_seq_len": 96}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("models") / "target"))


def drafts(target, head, **options):
    engine = specstep.eager(target, drafter=str(head), tree="chain", nodes=3, **(OPTIONS | options))
    return chains(engine, [None] * 4)


def test_names_behind_a_prefix_and_a_default_of_layers(target, tmp_path):
    """A config without layers reads those that z-lab's own code takes: 1 to L - 3, spread; here 1 and 0."""
    tensors = block_tensors(ZLAB)
    given = ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"target_layer_ids": [1, 0]}}
    silent = ZLAB | {"dflash_config": {"mask_token_id": ZLAB["dflash_config"]["mask_token_id"]}}
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    heads = [save_block(tmp_path / "a", given, tensors), save_block(tmp_path / "b", silent, prefixed)]
    assert drafts(target, heads[0]) == drafts(target, heads[1])
    assert drafts(target, heads[0] / "model.safetensors") == drafts(target, heads[0])


def test_a_tree_is_no_deeper_than_a_block(target, tmp_path):
    for config, deepest in (
        (ZLAB, 4),
        (DEEPSPEC, 4),
        (SPECFORGE, 4),
        (DOMINO_SHIFTED, 4),
        (ZLAB | {"block_size": 9}, 8),
    ):
        head = save_block(tmp_path / "head", config, block_tensors(config, TABLES))
        assert specstep.eager(target, drafter=str(head), **OPTIONS).session.spec.config["depth"] == deepest
        with pytest.raises(specstep.BuildError, match=f"depth: expected at most {deepest}, which is how many levels"):
            specstep.eager(target, drafter=str(head), tree="chain", nodes=deepest + 1, **OPTIONS)


OWN, FORGED, SHIFTED, TWICE = (config["dflash_config"] for config in (ZLAB, SPECFORGE, DOMINO, DFLASH2))
CASES = [
    (ZLAB, {"dflash_config": OWN | {"shift_label": True}}, "dflash_config.shift_label: expected none, got True"),
    (ZLAB, {"dflash_config": OWN | {"mask_token_id": 320}}, "mask_token_id: expected an id from 0 to 319, got 320"),
    (ZLAB, {"dflash_config": OWN | {"mask_token_id": None}}, "mask_token_id: expected a number from 0 on, got None"),
    (ZLAB, {"dflash_config": OWN | {"target_layer_ids": [3, 0]}}, "target_layer_ids: expected layers -1 to 2 of the"),
    (ZLAB, {"dflash_config": OWN | {"target_hidden_size": 64}}, "target_hidden_size: expected that of the drafter"),
    (ZLAB, {"num_target_layers": 36}, "num_target_layers: expected the target's 3, got 36"),
    (ZLAB, {"block_size": 1}, "block_size: expected a number from 2 on, got 1"),
    (ZLAB, {"model_type": "gemma4"}, "model_type: expected qwen3, whose layers it has, got 'gemma4'"),
    (ZLAB, SLIDING | {"sliding_window": None}, "sliding_window: expected a number from 1 on, got None"),
    (ZLAB, {"layer_types": ["full_attention"]}, "layer_types: expected full_attention or sliding_attention for 2"),
    (ZLAB, {"hidden_size": 64}, "expected a head for a target of hidden size 48, got one for 64"),
    (ZLAB, {"num_hidden_layers": 1}, "unexpected layers.1.input_layernorm.weight"),
    (ZLAB, {"dflash_config": [1]}, "dflash_config: expected an object, got"),
    (ZLAB, {"dflash_config": OWN | {"projector_type": "moe"}}, "projector_type: expected none or dspark or domino"),
    (SPECFORGE, {"dflash_config": FORGED | {"attention_mode": "mha"}}, "attention_mode: expected gqa, got 'mha'"),
    (SPECFORGE, {"dflash_config": FORGED | {"emb_dim": 4}}, "dflash_config.emb_dim: expected none, got 4"),
    (DOMINO, {"dflash_config": SHIFTED | {"emb_dim": None}}, "emb_dim: expected a number from 1 on, got None"),
    (DOMINO, {"dflash_config": SHIFTED | {"gru_hidden_dim": 13}}, r"correction.state.weight: expected .39, 13., got"),
    (DEEPSPEC, {"target_layer_ids": None}, "target_layer_ids: expected layers -1 to 2 of the target, got None"),
    (DEEPSPEC, {"markov_head_type": "moe"}, "markov_head_type: expected vanilla or gated or rnn, got 'moe'"),
    (DEEPSPEC, {"markov_rank": 0}, "unexpected correction.markov_w1.weight"),
    (DEEPSPEC, SLIDING, "layer_types: expected full_attention alone, got 'sliding_attention'"),
    (ZLAB, {"is_neox_style": False}, "is_neox_style: expected true: halves of heads are rotated, no pairs, got False"),
    (DFLASH, {"output_multiplier": 2.0}, "output_multiplier: expected none, as in all that speculators"),
    (DFLASH, {"sample_from_anchor": "no"}, "sample_from_anchor: expected true or false, got 'no'"),
    (DFLASH, {"speculators_model_type": "domino"}, "speculators_model_type: expected dflash or dflash2 or dspark, got"),
    (DFLASH2, {"dflash_config": TWICE | {"selector_top_k": 0}}, "selector_top_k: expected a number from 1 on, got 0"),
    (DFLASH2, {"dflash_config": TWICE | {"conv_group_size": 9}}, "conv_group_size: expected a number that 48 is"),
    (DFLASH2, {"dflash_config": TWICE | {"conv_kernel_size": 3}}, r"attention_conv.base_kernel: expected .2, 3,"),
    (DFLASH2, {"dflash_config": TWICE | {"input_embedding_scale": 7}}, "input_embedding_scale: expected 1, the"),
    (DFLASH2, {"dflash_config": TWICE | {"output_multiplier": "1"}}, "output_multiplier: expected a number, got '1'"),
    (DFLASH, {"sliding_window_non_causal": 1}, "sliding_window_non_causal: expected true or false, got 1"),
    (ZLAB, {"is_causal": 1}, "is_causal: expected true or false, got 1"),
    (ZLAB, {"feature_layers": [4]}, "feature_layers: expected layers 0 to 3 of the target"),
    (DFLASH, {"aux_hidden_state_layer_ids": [4]}, "aux_hidden_state_layer_ids: expected layers 0 to 3 of the target"),
    (DFLASH, {"transformer_layer_config": None}, "transformer_layer_config: expected the fields of its layers, got"),
    (DSPARK, {"topk_context": 64}, "topk_context: expected 0, attention to all of the text, got 64"),
    (DSPARK, {"sample_from_anchor": False, "markov_head_type": "rnn"}, "expected vanilla or gated, got 'rnn'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changes", "message"), CASES)
def test_configs_that_do_not_fit_are_refused(config, changes, message, target, tmp_path):
    tables = next(tables for known, tables, _ in PUBLISHED.values() if known is config)
    head = save_block(tmp_path / "head", config | changes, block_tensors(config, tables))
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(target, drafter=str(head), **OPTIONS)


def test_an_embedding_of_the_mask_that_lies_beside_the_weights_is_refused(target, tmp_path):
    """Xiaomi ships one; it would stand in place of the embedding's row."""
    config, tables, _ = next(iter(PUBLISHED.values()))
    head = save_block(tmp_path / "head", config, block_tensors(config, tables))
    torch.save(torch.ones(48), head / "mask_embedding.pt")
    with pytest.raises(specstep.BuildError, match=r"mask_embedding.pt: expected none: its mask token's row"):
        specstep.eager(target, drafter=str(head), **OPTIONS)


DAMAGED = [
    (lambda w: w.pop("layers.0.self_attn.q_norm.weight"), "missing layers.0.self_attn.q_norm.weight"),
    (lambda w: w.update({"layers.0.self_attn.sinks": torch.ones(4)}), "unexpected layers.0.self_attn.sinks"),
    (lambda w: w.update({"fc.weight": torch.ones(48, 48)}), r"fc.weight: expected \[48, 96\], got \[48, 48\]"),
    (lambda w: w.pop("lm_head.weight"), r"lm_head.weight: expected \[100, 48\], got none"),
    (lambda w: w.update({"d2t": w["d2t"] + 300}), "d2t: expected target ids below 320, got up to"),
    (lambda w: w.update({"embed_tokens.weight": torch.ones(320, 9)}), r"embeddings: expected 48 columns, got \[320, 9"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_tensors_that_do_not_fit_are_refused(damage, message, target, tmp_path):
    tensors = block_tensors(DSPARK, PUBLISHED["speculators-dspark"][1])
    damage(tensors)
    head = save_block(tmp_path / "head", DSPARK, tensors)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(target, drafter=str(head), **OPTIONS)


def test_a_head_with_more_tokens_than_the_target_is_refused(target, tmp_path):
    tensors = block_tensors(DEEPSPEC, TABLES)
    tensors["lm_head.weight"] = torch.ones(321, LAYER["hidden_size"])
    tensors["markov_head.markov_w2.weight"] = torch.ones(321, 8)
    head = save_block(tmp_path / "head", DEEPSPEC, tensors)
    with pytest.raises(specstep.BuildError, match=r"lm_head.weight: expected at most the target's 320 tokens, got 321"):
        specstep.eager(target, drafter=str(head), **OPTIONS)

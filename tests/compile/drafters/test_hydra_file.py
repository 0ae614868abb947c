"""Hydra's heads as they are published: which hidden state they read, and what is refused by name."""

import pytest
import specstep
import torch
from hydra_heads import PREFIX, hydra_tensors, save_hydra
from models import save_model
from specstep.compile.config import EngineConfig
from specstep.compile.drafters.hydra_file import is_hydra, load_hydra
from specstep.compile.source import load_source


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("offset", "layer"), [(0, 4), (1, 2), (3, 0)])
def test_the_hidden_state_that_an_offset_means(offset, layer, target, tmp_path):
    """0 is that behind the final norm; others count from there, as transformers lists them."""
    source = load_source(str(target), "float32", "cpu")
    for plus in (False, True):
        head = save_hydra(tmp_path / str(plus), hydra_tensors(plus), hidden_state_offset=offset)
        scorer = load_hydra(str(head), source, EngineConfig(drafter=str(head), dtype="float32"))
        assert scorer.feature_layers == (layer,) and scorer.most_depth == 3


@pytest.mark.parametrize(
    ("damage", "config", "message"),
    [
        (lambda t: t.pop("hydra_lm_head.1.1.bias"), {}, "missing hydra_lm_head.1.bias"),
        (lambda t: t.pop("hydra_lm_head.0.1.weight"), {}, "missing hydra_mlp.0 or hydra_lm_head.0"),
        (lambda t: t.pop("hydra_mlp.2.1.linear.weight"), {}, "missing hydra_mlp.2.0.linear.weight"),
        (lambda t: t.pop(f"{PREFIX}norm.weight"), {}, "missing norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), {}, "unexpected extra"),
        (lambda t: t.update({f"{PREFIX}odd": torch.ones(1)}), {}, "unexpected odd"),
        (
            lambda t: t.update({"hydra_lm_head.0.1.weight": torch.ones(400, 48)}),
            {},
            "expected at most 320 rows, got 400",
        ),
        (lambda t: None, {"hydra_head_arch": "mlp"}, "unexpected prefix_embeding_layer"),
        (lambda t: None, {"hydra_head_arch": "cross-attn"}, "expected mlp or prefix-mlp, got cross-attn"),
        (lambda t: None, {"grounded_heads": False}, "grounded_heads: expected True, got False"),
        (lambda t: None, {"hidden_state_offset": 4}, "hidden_state_offset: expected 0 to 3, got 4"),
    ],
)
def test_heads_that_do_not_fit_are_refused(damage, config, message, target, tmp_path):
    tensors = hydra_tensors(plus=True)
    damage(tensors)
    head = save_hydra(tmp_path / "head", tensors, **({"hydra_head_arch": "prefix-mlp"} | config))
    assert is_hydra(str(head))
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)

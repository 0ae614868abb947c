"""Modules for multi-token prediction: drafts against transformers and a plain recomputation, exact output, and modules
that are always right."""

import copy
import json
import shutil

import pytest
import specstep
import torch
from cycle import SIZE, accepted, save_cycle, to_axis
from models import ARCHITECTURES, greedy, save_model, tiny_model
from mtp_modules import (
    GLM,
    LAYOUTS,
    add_module,
    module_tensors,
    mtp_chain,
    nemotron_h_chain,
    nemotron_h_module,
    write_module,
)
from plain_eagle3 import chains, last_hidden
from specstep.graphs.target import CausalLM
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

pytestmark = pytest.mark.usefixtures("as_published")

PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = {
    "chain": {"tree": "chain", "nodes": 3},
    "static": {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    "dynamic": {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
}
CHAIN = {"drafter": "mtp", "dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 4}
EPS = {"rms_norm_eps": 1e-5}
MIXTURES = {"Glm4Moe": GLM, "DeepseekV3": ARCHITECTURES["DeepseekV3"]}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    """A target of an architecture whose checkpoints have a module, a mixture of experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, request.param, MIXTURES[request.param])
        folder = save_model(tmp_path_factory.mktemp(request.param), request.param)
        tensors = module_tensors(tiny_model(request.param))
    return add_module(folder, "DeepSeek-V3", tensors)


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 12, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4]], ids=["all", "any"])
def test_drafts_are_those_of_transformers(nodes, mixture):
    """Over many steps of any number of nodes, of a dense layer's attention and a mixture of experts."""
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]  # it knows the published sizes alone
    module = MtpModel.from_pretrained(model).eval()
    for tokens, got in chains(specstep.eager(str(mixture), **CHAIN), nodes):
        hidden, following, drafted = last_hidden(model, tokens)[None], list(tokens[1:]), []
        for _ in range(4):
            given = {"input_ids": torch.tensor([following]), "position_ids": torch.arange(len(following))[None]}
            cache = MtpCache(config=model.config.get_mtp_config())
            out = module.forward_layer(0, hidden, mtp_cache=cache, **given)[:, -1:]
            drafted.append(int(module._project_to_logits(out).argmax()))
            following.append(drafted[-1])
            hidden = torch.cat([hidden, out], 1)
        assert got == drafted


@pytest.mark.parametrize("tree", TREES)
def test_output_equals_transformers(tree, mixture):
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    expected = [greedy(model, prompt, 20, [1]) for prompt in PROMPTS]
    for drafter in ("mtp", "ngram,mtp"):
        options = TREES[tree] | {"drafter": drafter, "dtype": "float32", "max_batch": 4, "max_seq_len": 96}
        assert [r.token_ids for r in specstep.eager(str(mixture), **options).generate(PROMPTS, 20)] == expected


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_drafts_of_a_plain_recomputation(layout, tmp_path):
    """Pairing a hidden state with the token one place on shows, and so does the other order of the two."""
    model = tiny_model("Llama", **EPS)
    tensors = module_tensors(model)
    folder = add_module(save_model(tmp_path / "target", **EPS), layout, tensors)
    found = chains(specstep.eager(str(folder), **CHAIN), [None] * 5)
    assert [got for _, got in found] == [mtp_chain(tensors, model, tokens, 4, layout) for tokens, _ in found]
    other = "Qwen3-Next" if layout == "MiMo" else "MiMo"
    for wrong in ({"layout": layout, "shift": 0}, {"layout": other}):
        assert [got for _, got in found] != [mtp_chain(tensors, model, tokens, 4, **wrong) for tokens, _ in found]


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """A target with a module of two layers, attention and a mixture of experts without gates -> its folder, the layers
    and the module's tensors."""
    model = tiny_model("NemotronH")
    layers, tensors = nemotron_h_module(model)
    folder = save_model(tmp_path_factory.mktemp("nemotron"), "NemotronH", num_nextn_predict_layers=1)
    return write_module(folder, {}, {}, **tensors), layers, tensors


@torch.no_grad()
@pytest.mark.parametrize("nodes", [[None] * 12, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4]], ids=["all", "any"])
def test_a_module_of_several_layers_gives_the_drafts_of_a_plain_recomputation(nodes, nemotron):
    folder, layers, tensors = nemotron
    model = tiny_model("NemotronH")
    found = list(chains(specstep.eager(str(folder), **CHAIN), nodes))
    assert [got for _, got in found] == [nemotron_h_chain(layers, tensors, model, tokens, 4) for tokens, _ in found]
    assert any(got != nemotron_h_chain(layers, tensors, model, tokens, 4, shift=0) for tokens, got in found)


@pytest.mark.parametrize("tree", TREES)
def test_a_module_of_several_layers_changes_no_text(tree, nemotron):
    expected = [greedy(tiny_model("NemotronH"), prompt, 20, [1]) for prompt in PROMPTS]
    for drafter in ("mtp", "ngram,mtp"):
        options = TREES[tree] | {"drafter": drafter, "dtype": "float32", "max_batch": 4, "max_seq_len": 96}
        found = specstep.eager(str(nemotron[0]), **options).generate(PROMPTS, 20)
        assert [result.token_ids for result in found] == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mtp_layers_block_type": ["full_attention", "mlp"]}, "expected types of layers of the target, got 'mlp'"),
        ({"mtp_layers_block_type": ["full_attention"] * 2}, "expected one layer of type full_attention and others"),
        (
            {"mtp_layers_block_type": ["full_attention", "linear_attention"]},
            "one layer of .* others without a state",
        ),
        (
            {"num_nextn_predict_layers": 2},
            "num_nextn_predict_layers: expected 1, as many modules as",
        ),
        ({"mtp_layers_block_type": ["moe", "full_attention"]}, "tensors do not fit"),
    ],
)
def test_modules_of_other_layers_are_refused(config, message, nemotron, tmp_path):
    folder = shutil.copytree(nemotron[0], tmp_path / "target")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(specstep.BuildError, match=f"drafter: mtp: .*{message}"):
        specstep.eager(str(folder), **CHAIN)


@torch.no_grad()
def test_a_copy_of_a_model_that_ran_holds_no_state():
    """Builds for a GPU that is not there copy it without its memory, after transformers' own passes over it."""
    model = CausalLM(tiny_model("Llama"), feature_layers=[4])
    model.model.lm_head(torch.zeros(1, 3, 48))
    assert model.normed.state is not None
    other = copy.deepcopy(model)
    assert other.normed is not model.normed and other.normed.state is None
    other.model.lm_head(torch.zeros(1, 2, 48))
    assert other.normed.state.shape[1] == 2 and model.normed.state.shape[1] == 3


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_a_module_that_knows_the_answer_is_always_right(reads, off, tmp_path):
    """From the token alone, and from the hidden state alone. One that is a place off is never right."""
    folder, model = save_cycle(tmp_path / "cycle"), tiny_model("Llama", vocab_size=40)
    tensors = {name: tensor * 0 for name, tensor in module_tensors(model).items()}
    tensors |= {f"{norm}.weight": torch.ones(SIZE) for norm in ("enorm", "hnorm", "norm")}
    nothing = torch.zeros(SIZE, SIZE)
    halves = [to_axis(off), nothing] if reads == "token" else [nothing, to_axis(1 + off)]
    add_module(folder, "DeepSeek-V3", tensors | {"proj.weight": torch.cat(halves, 1)})
    assert accepted(specstep.eager(str(folder), **CHAIN)) == [{4: 5}, {0: 24}][off]

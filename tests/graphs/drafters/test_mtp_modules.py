"""Several modules for multi-token prediction, one for each depth: drafts against transformers and a plain
recomputation, exact output, modules that are always right, and what is refused."""

import pytest
import specstep
import torch
from cycle import SIZE, accepted, save_cycle, to_axis
from models import ARCHITECTURES, greedy, save_model, tiny_model
from mtp_modules import (
    GLM,
    MIMO_V2,
    add_deepseek_modules,
    add_mimo_v2_modules,
    mimo_v2_chain,
    mimo_v2_module,
    module_tensors,
)
from plain_eagle3 import chains, hidden_states, last_hidden
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

pytestmark = pytest.mark.usefixtures("as_published")

K = 3
OPTIONS = {"drafter": "mtp", "dtype": "float32", "max_seq_len": 96}
CHAIN = OPTIONS | {"tree": "chain", "nodes": K}
ANY = [0, 0, 0, 3, 1, 2, 0, 3, 1, 1, 2, 0, 0, 0, 0, 3]
TREES = [
    {"tree": "chain", "nodes": 2},
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 3, "top_k": 3},
]
PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]


@pytest.fixture(scope="module")
def chained(tmp_path_factory):
    """A target with modules that take each other's outputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "Glm4Moe", GLM | {"num_nextn_predict_layers": K})
        folder = save_model(tmp_path_factory.mktemp("chained"), "Glm4Moe")
        model = tiny_model("Glm4Moe")
    return add_deepseek_modules(folder, [module_tensors(model, seed=place) for place in range(K)])


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A target with modules that all take its own hidden states, and these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "MiMoV2Flash", MIMO_V2)
        folder = save_model(tmp_path_factory.mktemp("apart"), "MiMoV2Flash")
    modules = [mimo_v2_module(place) for place in range(K)]
    return add_mimo_v2_modules(folder, modules), modules


def target_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2}], ids=["whole", "chunks"])
def test_drafts_are_those_of_transformers(options, chained):
    """Over steps of any number of nodes; the control takes the target's hidden state for every module."""
    model = target_of(chained)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{3 + place}\." for place in range(K)]
    modules, others = MtpModel.from_pretrained(model).eval(), 0
    for tokens, got in chains(specstep.eager(str(chained), **CHAIN | options), ANY):
        hidden, following = last_hidden(model, tokens)[None], torch.tensor([list(tokens[1:])])
        where, cache = torch.arange(1, len(tokens))[None], MtpCache(config=model.config.get_mtp_config())
        assert got == modules(following, hidden, None, where, cache)[0][0].tolist()
        cache, following = MtpCache(config=model.config.get_mtp_config()), torch.tensor([[*tokens, *got]])
        out = modules.forward_layer(1, hidden, where, cache, following[:, 2 : 1 + len(tokens)])
        others += int(modules._project_to_logits(out[:, -1]).argmax()) != got[1]
    assert others > 0


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 2}], ids=["whole", "chunks"])
def test_modules_apart_draft_as_a_plain_recomputation(options, apart):
    """Of MiMo-V2's, which take the output of the last layer; the controls are the normed one, chained modules, and a
    token a place off."""
    folder, modules = apart
    model = target_of(folder)
    found = [(got, tokens) for tokens, got in chains(specstep.eager(str(folder), **CHAIN | options), ANY)]
    before = [hidden_states(model, tokens)[-1][:-1] for _, tokens in found]
    assert [got for got, _ in found] == [
        mimo_v2_chain(modules, model, tokens, hidden) for (_, tokens), hidden in zip(found, before, strict=True)
    ]
    for changes in ({"chained": True}, {"shift": 0}):
        assert any(
            got != mimo_v2_chain(modules, model, tokens, hidden, **changes)
            for (got, tokens), hidden in zip(found, before, strict=True)
        )
    weight = torch.linspace(0.2, 3.0, SIZE)  # a final norm that shows
    assert any(
        got != mimo_v2_chain(modules, model, tokens, hidden * weight)
        for (got, tokens), hidden in zip(found, before, strict=True)
    )


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_output_equals_transformers(tree, chained, apart):
    for folder, drafter in ((chained, "mtp"), (apart[0], "mtp"), (chained, "ngram,mtp")):
        options = OPTIONS | tree | {"drafter": drafter, "max_batch": 4}
        expected = [greedy(target_of(folder), prompt, 16, [1]) for prompt in PROMPTS]
        assert [r.token_ids for r in specstep.eager(str(folder), **options).generate(PROMPTS, 16)] == expected


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_chained_modules_that_know_the_answer_are_always_right(reads, off, tmp_path):
    """From the token alone, or from the hidden state alone, which each module moves on by one place. A second module
    that is a place off is never right, nor is the third one behind it."""
    folder, model = save_cycle(tmp_path / "cycle"), tiny_model("Llama", vocab_size=40)
    modules = []
    for place in range(K):
        tensors = {name: tensor * 0 for name, tensor in module_tensors(model).items()}
        tensors |= {f"{norm}.weight": torch.ones(SIZE) for norm in ("enorm", "hnorm", "norm")}
        wrong, nothing = off if place == 1 else 0, torch.zeros(SIZE, SIZE)
        halves = [to_axis(wrong), nothing] if reads == "token" else [nothing, to_axis(1 + wrong)]
        modules.append(tensors | {"proj.weight": torch.cat(halves, 1)})
    add_deepseek_modules(folder, modules)
    found = accepted(specstep.eager(str(folder), **CHAIN))
    assert found == ([{3: 6}, {1: 12}][off])


@pytest.mark.parametrize("chain", [False, True], ids=["apart", "as if chained"])
def test_modules_apart_that_know_the_answer_are_always_right(chain, tmp_path):
    """From the target's hidden state, which is the further behind the deeper a module is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "MiMoV2Flash", MIMO_V2)
        folder = save_cycle(tmp_path / "cycle", "MiMoV2Flash")
    modules = [{name: tensor * 0 for name, tensor in mimo_v2_module().items()} for _ in range(K)]
    for place, tensors in enumerate(modules):
        tensors |= {f"{norm}.weight": torch.ones(SIZE) for norm in ("enorm", "hnorm", "final_layernorm")}
        far = 1 if chain else 1 + place
        tensors["eh_proj.weight"] = torch.cat([torch.zeros(SIZE, SIZE), to_axis(far)], 1)
        modules[place] = tensors
    add_mimo_v2_modules(folder, modules)
    assert accepted(specstep.eager(str(folder), **CHAIN)) == ({1: 12} if chain else {3: 6})


def test_drafts_behind_what_a_prefix_cache_kept_are_those_behind_a_prefill(chained, monkeypatch):
    prompt, drafted = [40, 41, 42, 50, 9] * 14, []
    for budget in (0, 1 << 24):
        engine = specstep.eager(str(chained), **CHAIN | {"max_seq_len": 96}, prefix_cache_bytes=budget)
        step, trees = engine.session.step, []

        def spy(*given, step=step, engine=engine, trees=trees):
            trees.append(engine.session.tree(0))
            return step(*given)

        monkeypatch.setattr(engine.session, "step", spy)
        cached = [engine.generate(prompt, 12, ignore_eos=True).stats["cached_tokens"] for _ in range(2)]
        drafted.append([tree.tokens for tree in trees])
        assert (cached[1] > 0) == (budget > 0)
    assert drafted[0] == drafted[1]


def test_a_deeper_tree_than_there_are_modules_is_refused_unless_n_grams_go_on(chained):
    with pytest.raises(specstep.BuildError, match=r"depth: expected at most 3, which is how many levels mtp scores"):
        specstep.eager(str(chained), **OPTIONS | {"tree": "chain", "nodes": 4})
    deep = specstep.eager(str(chained), **OPTIONS | {"drafter": "ngram,mtp", "nodes": 7, "depth": 6})
    assert deep.generate([5, 6, 7], 12, ignore_eos=True).token_ids == greedy(target_of(chained), [5, 6, 7], 12)


def test_a_number_of_modules_that_the_config_does_not_say_is_refused(chained, tmp_path):
    for file in chained.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(chained / "model.safetensors")
    fewer = {name: tensor for name, tensor in tensors.items() if ".layers.5." not in name}
    save_file(fewer, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(specstep.BuildError, match="num_nextn_predict_layers: expected 2, as many modules as"):
        specstep.eager(str(tmp_path), **CHAIN)
    holes = {name: tensor for name, tensor in tensors.items() if ".layers.4." not in name}
    save_file(holes, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(specstep.BuildError, match="mtp: module 1: tensors do not fit: missing"):
        specstep.eager(str(tmp_path), **CHAIN)


@pytest.mark.slow
def test_an_engine_with_them(chained, tmp_path):
    specstep.build(str(chained), tmp_path / "engine", max_batch=2, **OPTIONS)
    expected = [greedy(target_of(chained), prompt, 16, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 16)] == expected

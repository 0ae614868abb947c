"""Gemma 4's assistants, which read the target's keys and values: drafts against transformers' own, exact output, and
what is refused."""

import pytest
import specstep
import torch
from assistants import CLUSTERS, TARGET, WINDOW, save_assistant, save_target
from cycle import SIZE, TOKENS, accepted, save_cycle, to_axis
from models import ARCHITECTURES, greedy
from plain_eagle3 import chains, hidden_states, last_hidden
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

OPTIONS = {"dtype": "float32", "max_seq_len": 96}
CHAIN = OPTIONS | {"tree": "chain", "nodes": 4}
PROMPTS = [[5], [7, 8], [40, 41, 42] * 9, list(range(30, 83))]
TREES = [
    {"tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    {"tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")
    save_target(folder / "target")
    save_assistant(folder / "whole")
    save_assistant(folder / "clusters", **CLUSTERS)
    return folder


def target_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


def assistant_of(folder, name):
    """transformers' own. Its mask counts the window from the last key and takes one more: two tokens farther than a
    token at the root's position sees."""
    assistant = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    assistant.config.get_text_config().sliding_window -= 2
    return assistant


@torch.no_grad()
def assistant_chain(assistant, model, tokens, length, moves=False, normed=True):
    """The chain that transformers' assistant drafts after these tokens. moves: whether it goes on to the next position
    with each token, as no assistant does; normed: whether it begins with the hidden state behind the final norm."""
    out = model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True, use_cache=False)
    hidden = last_hidden(model, tokens) if normed else hidden_states(model, tokens[:-1])[-1]
    hidden, token, drafted = hidden[-1:][None], tokens[-1], []
    for _ in range(length):
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        told = assistant(
            inputs_embeds=torch.cat([embedded, hidden], -1),
            position_ids=torch.tensor([[len(tokens) - 1 + moves * len(drafted)]]),
            shared_kv_states=out.shared_kv_states,
        )
        token, hidden = int(told.logits[0, -1].argmax()), told.last_hidden_state
        drafted.append(token)
    return drafted


@pytest.mark.parametrize("nodes", [[None] * 12, [0, 0, 0, 4, 1, 2, 0, 3, 1, 1, 4]], ids=["all", "any"])
@pytest.mark.parametrize("name", ["whole", "clusters"])
def test_drafts_are_those_of_transformers(name, nodes, folder):
    model, assistant = target_of(folder), assistant_of(folder, name)
    found = list(chains(specstep.eager(str(folder / "target"), drafter=str(folder / name), **CHAIN), nodes))
    assert [got for _, got in found] == [assistant_chain(assistant, model, tokens, 4) for tokens, _ in found]
    for wrong in ({"moves": True}, {"normed": False}):
        assert any(got != assistant_chain(assistant, model, tokens, 4, **wrong) for tokens, got in found)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["tree"])
def test_output_equals_transformers(tree, folder):
    expected = [greedy(target_of(folder), prompt, 16, [1]) for prompt in PROMPTS]
    for drafter in ("", "ngram,"):
        options = OPTIONS | tree | {"drafter": drafter + str(folder / "whole"), "max_batch": 4}
        found = specstep.eager(str(folder / "target"), **options).generate(PROMPTS, 16)
        assert [result.token_ids for result in found] == expected


@pytest.mark.parametrize("off", [0, 1])
@pytest.mark.parametrize("reads", ["token", "hidden state"])
def test_an_assistant_that_knows_the_answer_is_always_right(reads, off, tmp_path):
    """From the token alone, or from the hidden state alone, which it moves on by one place. One that is a place off is
    never right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "Gemma4Text", TARGET)
        folder = save_cycle(tmp_path / "cycle", "Gemma4Text")
    head = save_assistant(tmp_path / "head", hidden_size=SIZE, vocab_size=TOKENS)
    tensors = load_file(head / "model.safetensors")
    tensors = {
        name: torch.ones_like(tensor) if tensor.dim() == 1 else torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    }
    nothing = torch.zeros(SIZE, SIZE)
    halves = [to_axis(1 + off), nothing] if reads == "token" else [nothing, to_axis(2 + off)]
    tensors["pre_projection.weight"] = torch.cat(halves, 1)
    tensors["post_projection.weight"] = torch.eye(SIZE)
    tensors["model.embed_tokens.weight"] = torch.eye(TOKENS, SIZE)
    if reads == "hidden state":  # its own is that of the token which it drafted, the target's of the one ahead
        tensors["post_projection.weight"] = to_axis(-1)
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    assert accepted(specstep.eager(str(folder), drafter=str(head), **CHAIN)) == ({0: 24} if off else {4: 5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": 40}, "backbone_hidden_size: expected 48, the target's, got 40"),
        ({"vocab_size": 300}, "vocab_size: expected 320, the target's, got 300"),
        ({"sliding_window": 9}, "sliding_window: expected 6, the target's, got 9"),
        (
            {"head_dim": 12},
            "expected a target with a sliding_attention layer with heads of 12, got one with heads of 16",
        ),
    ],
)
def test_assistants_of_other_targets_are_refused(changes, message, folder, tmp_path):
    head = save_assistant(tmp_path / "head", **changes)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(folder / "target"), drafter=str(head), **OPTIONS)


def test_other_targets_and_damaged_assistants_are_refused(folder, model_folder, tmp_path):
    head = save_assistant(tmp_path / "head", sliding_window=WINDOW)
    with pytest.raises(specstep.BuildError, match="sliding_window: expected None, the target's, got 6"):
        specstep.eager(str(model_folder), drafter=str(head), **OPTIONS)
    tensors = load_file(head / "model.safetensors")
    del tensors["post_projection.weight"]
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    with pytest.raises(specstep.BuildError, match=r"tensors do not fit: post_projection.weight"):
        specstep.eager(str(folder / "target"), drafter=str(head), **OPTIONS)


@pytest.mark.slow
def test_an_engine_with_it(folder, tmp_path):
    target, drafter = str(folder / "target"), str(folder / "whole")
    specstep.build(target, tmp_path / "engine", drafter=drafter, max_batch=2, **OPTIONS)
    expected = [greedy(target_of(folder), prompt, 16, [1]) for prompt in PROMPTS]
    with specstep.load(tmp_path / "engine") as engine:
        assert [result.token_ids for result in engine.generate(PROMPTS, 16)] == expected

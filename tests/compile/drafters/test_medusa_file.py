"""Medusa's heads as they are published: each layout gives the same drafts, what does not fit is refused."""

import pytest
import specstep
import torch
from models import VOCABULARY, save_model, tiny_model
from plain_eagle3 import chains
from position_heads import medusa_chain, medusa_tensors, save_medusa, save_vllm
from safetensors.torch import save_file
from specstep.compile.drafters.medusa_file import is_medusa

OPTIONS = {"dtype": "float32", "max_seq_len": 96, "tree": "chain", "nodes": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


def drafts(target, head):
    return chains(specstep.eager(str(target), drafter=str(head), **OPTIONS), [None] * 4)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("save", [save_medusa, save_vllm])
def test_every_layout_gives_the_same_drafts(save, layers, bias, target, tmp_path):
    """The numbers of heads and layers are those of the file, whatever config.json says."""
    tensors, model = medusa_tensors(layers=layers, bias=bias), tiny_model("Llama")
    for found in (drafts(target, save(tmp_path / "head", tensors)),):
        assert [got for _, got in found] == [medusa_chain(tensors, model, tokens, 3) for tokens, _ in found]


@torch.no_grad()
def test_a_file_alone_and_names_of_a_whole_model(target, tmp_path):
    tensors = medusa_tensors()
    first = drafts(target, save_medusa(tmp_path / "head", tensors) / "medusa_lm_head.pt")
    (tmp_path / "merged").mkdir()
    save_file(
        {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "merged/heads.safetensors"
    )
    assert drafts(target, tmp_path / "merged/heads.safetensors") == first


@torch.no_grad()
@pytest.mark.parametrize("cut", [False, True])
def test_a_token_map(cut, target, tmp_path):
    """Heads over some tokens: the file has their rows, or all rows and the map."""
    tensors, model = medusa_tensors(layers=1), tiny_model("Llama")
    ids = torch.randperm(VOCABULARY)[:50]
    few = {name: tensor[ids] if name.endswith(".1.weight") else tensor for name, tensor in tensors.items()}
    head = save_vllm(tmp_path / "head", (few if cut else tensors) | {"token_map": ids})
    found = drafts(target, head)
    assert [got for _, got in found] == [medusa_chain(few, model, tokens, 3, ids) for tokens, _ in found]


@torch.no_grad()
def test_one_head_for_all_blocks(target, tmp_path):
    """vLLM's `original_lm_head`."""
    tensors, model = medusa_tensors(layers=1), tiny_model("Llama")
    shared = tensors | {f"{head}.1.weight": tensors["0.1.weight"] for head in range(3)}
    few = {name: tensor for name, tensor in tensors.items() if name not in ("1.1.weight", "2.1.weight")}
    found = drafts(target, save_vllm(tmp_path / "head", few, original_lm_head=True))
    assert [got for _, got in found] == [medusa_chain(shared, model, tokens, 3) for tokens, _ in found]


def test_other_directories_are_no_heads(target, head_folder, tmp_path):
    names = [target, head_folder, tmp_path, tmp_path / "nowhere"]
    assert not any(is_medusa(str(name)) for name in names)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("1.2.weight"), "missing lm_heads.1.weight"),
        (lambda t: t.pop("0.2.weight"), "missing lm_heads.0.weight"),
        (lambda t: t.pop("1.0.linear.weight"), "missing blocks.1.layers.0.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda t: t.update({"0.0.linear.weight": torch.ones(9, 9)}), r"blocks.0.layers.0.weight: expected \[48, 48\]"),
        (
            lambda t: t.update({"0.2.weight": torch.ones(400, 48)}),
            "lm_heads.0.weight: expected at most 320 rows, got 4",
        ),
        (lambda t: t.update({"token_map": torch.tensor([5, 999])}), "token_map: expected ids below 320"),
        (lambda t: t.update(note=print), "expected readable tensors"),
        (lambda t: t.update(note={}), "expected tensors alone, got note: dict"),
    ],
)
def test_heads_that_do_not_fit_are_refused(damage, message, target, tmp_path):
    tensors = medusa_tensors()
    head = save_medusa(tmp_path / "head", tensors)
    assert is_medusa(str(head))
    damage(tensors)
    save_medusa(head, tensors)
    with pytest.raises(specstep.BuildError, match=message):
        specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)


def test_a_tree_is_no_deeper_than_the_heads(target, tmp_path):
    head = str(save_medusa(tmp_path / "head", medusa_tensors(count=2)))
    options = {"dtype": "float32", "max_seq_len": 96}
    config = specstep.eager(str(target), drafter=head, **options).spec.config
    assert (config["depth"], config["nodes"]) == (2, 12)
    assert specstep.eager(str(target), drafter=head, nodes=20, **options).spec.config["depth"] == 2
    assert specstep.eager(str(target), drafter=f"ngram,{head}", nodes=20, **options).spec.config["depth"] > 2
    with pytest.raises(specstep.BuildError, match=r"depth: expected at most 2, which is how many levels .*, got 3"):
        specstep.eager(str(target), drafter=head, tree="chain", nodes=3, **options)

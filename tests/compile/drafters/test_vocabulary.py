"""Which tokens two tokenizers share: what each stands for, not how it is spelled."""

import dataclasses

import pytest
import specstep
import torch
from models import pieces_tokenizer, save_model, tiny_model, tiny_tokenizer
from specstep.compile.drafters.vocabulary import SAMPLE, tokens_between
from specstep.compile.source import Source, load_source
from specstep.graphs.drafters.vocabulary import CommonTokens, SameTokens
from tokenizers import AddedToken

BYTES = tiny_tokenizer().get_vocab()  # in GPT-2's alphabet
PIECES = pieces_tokenizer().get_vocab()


def source(tokenizer, name="tiny", **changes) -> Source:
    return Source(name, tiny_model("Llama", **changes), tokenizer)


def shared(ours, theirs) -> dict[int, int]:
    """The target's ids -> the drafter's, of tokens that may be drafted."""
    found = tokens_between(source(ours), source(theirs))
    assert isinstance(found, CommonTokens)
    pairs = dict(zip(found.ids.tolist(), found.drafted.tolist(), strict=True))
    assert len(pairs) == len(found.ids), "each once"
    assert all(found.given[own] == other for own, other in pairs.items()), "the drafter is given what it drafts"
    return pairs


def test_tokens_are_matched_by_the_bytes_that_they_stand_for():
    pairs = shared(tiny_tokenizer(), pieces_tokenizer())
    expected = {"a": "a", "z": "z", "Ġ": "▁", "Ċ": "<0x0A>", "A": "<0x41>", "Ã": "<0xC3>", "ł": "<0xA0>", "!": "<0x21>"}
    for own, other in expected.items():
        assert pairs[BYTES[own]] == PIECES[other], own
    assert len(pairs) == 258, "every byte, and what begins and ends a text"
    back = shared(pieces_tokenizer(), tiny_tokenizer())
    assert {other: own for own, other in back.items()} == pairs


def test_a_word_is_preferred_to_a_byte_and_both_are_read():
    found = tokens_between(source(pieces_tokenizer()), source(tiny_tokenizer()))
    assert found.given[PIECES["a"]] == found.given[PIECES["<0x61>"]] == BYTES["a"]
    assert PIECES["<0x61>"] not in found.ids.tolist()


def test_control_tokens_are_matched_by_name_then_by_what_they_do():
    ours, theirs = tiny_tokenizer(), pieces_tokenizer()
    assert shared(ours, theirs)[BYTES["</s>"]] == PIECES["</s>"]
    renamed = pieces_tokenizer()
    renamed.add_special_tokens({"eos_token": "<end>"})
    pairs, ids = shared(ours, renamed), renamed.get_vocab()
    assert (pairs[BYTES["</s>"]], pairs[BYTES["<s>"]]) == (ids["</s>"], ids["<s>"]), "the name goes first"
    bare = tiny_tokenizer()
    bare.add_special_tokens({"eos_token": "<end>"})
    other = tiny_tokenizer()
    other.add_special_tokens({"eos_token": "<stop>"})
    pairs = shared(bare, other)
    assert pairs[bare.eos_token_id] == other.eos_token_id and pairs[0] == 0 and pairs[1] == 1


def test_a_word_that_is_spelled_as_a_control_token_is_another():
    ours, theirs = tiny_tokenizer(), tiny_tokenizer()
    ours.add_tokens([AddedToken("<think>", special=True)])
    theirs.add_tokens([AddedToken("<think>", special=False), AddedToken("more", special=False)])
    word, control = theirs.convert_tokens_to_ids("<think>"), ours.convert_tokens_to_ids("<think>")
    assert control not in shared(ours, theirs) and word not in shared(ours, theirs).values()


def test_tokens_that_the_drafter_lacks_are_read_as_their_end():
    ours = tiny_tokenizer()
    ours.add_tokens(["the", "ab\x80", "q"])
    theirs = pieces_tokenizer(without="q")
    found, ids = tokens_between(source(ours), source(theirs)), theirs.get_vocab()
    expected = {"the": ids["e"], "ab\x80": ids["<0x80>"], "q": ids["<unk>"]}
    assert {word: int(found.given[ours.convert_tokens_to_ids(word)]) for word in expected} == expected
    assert int(found.given[319]) == ids["<unk>"], "an id that stands for nothing"
    missing = {ours.convert_tokens_to_ids(word) for word in expected}
    assert not missing & {*found.ids.tolist()}


def test_rows_past_a_table_are_not_drafted():
    found = tokens_between(source(tiny_tokenizer(), vocab_size=100), source(pieces_tokenizer(), vocab_size=200))
    assert found.ids.max() < 100 and found.drafted.max() < 200 and len(found.given) == 100


def test_the_same_tokenizer_needs_no_map():
    found = tokens_between(source(tiny_tokenizer()), source(tiny_tokenizer(), vocab_size=300))
    assert isinstance(found, SameTokens) and found.embedded == 300 and found.vocabulary == 320


def test_what_is_in_common_is_said_and_too_little_is_refused():
    found = tokens_between(source(tiny_tokenizer()), source(pieces_tokenizer()))
    assert found.said == "258 of 286 tokens in common with the target, 100% of those of a sample text"
    most = "etaoinshr "
    left = 1 - sum(SAMPLE.count(letter) for letter in most) / len(SAMPLE)
    with pytest.raises(specstep.BuildError) as error:
        tokens_between(source(tiny_tokenizer(), "big"), source(pieces_tokenizer(without=most), "small"))
    assert str(error.value) == (
        "drafter: small: expected a tokenizer like that of big, with 50% of the tokens of a sample text, got another "
        f"with 248 of 266 tokens in common with the target, {left:.0%} of those of a sample text; take a drafter of "
        "the target's family"
    )
    assert left < 0.5


def test_without_tokenizers_sizes_are_compared():
    bare = dataclasses.replace(source(None), name="bare")
    with pytest.raises(specstep.BuildError, match=r"bare: expected a vocabulary of 300, as tiny, got 320; to have"):
        tokens_between(source(None, vocab_size=300), bare)
    assert isinstance(tokens_between(bare, bare), SameTokens)


def test_files_of_another_tokenizer_draft(tmp_path):
    target, small = save_model(tmp_path / "target", tokenizer=True), save_model(tmp_path / "small", seed=1)
    pieces_tokenizer().save_pretrained(small)
    found = tokens_between(*(load_source(str(path), "float32", "cpu") for path in (target, small)))
    assert torch.equal(found.given[found.ids], found.drafted)

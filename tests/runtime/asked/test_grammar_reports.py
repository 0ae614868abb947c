"""What broke grammars elsewhere, by reports to vLLM, SGLang, llama.cpp and OpenVINO."""

import json

import numpy as np
import pytest
import specstep
import torch
from fake_session import FakeSession
from grammars import EOS, VOCABULARY
from models import SMALL, save_model, tiny_model, tiny_tokenizer, token_of
from specstep import DraftedTree, InputError, SamplingParams
from specstep.runtime.asked.grammar import Grammar
from specstep.runtime.asked.structured import checked_structured
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROUND = "ab</think>"  # no letter comes twice: each says the next
ASKED = [{"role": "user", "content": ROUND * 3}]
A, B = token_of("a"), token_of("b")


@pytest.fixture(scope="module")
def thinks(tmp_path_factory):
    """A model that thinks, and whose every thought is ROUND, without end."""
    folder = save_model(tmp_path_factory.mktemp("thinks"))
    model, tokens = tiny_model("Llama"), [token_of(letter) for letter in ROUND]
    torch.manual_seed(0)
    axes, scores = torch.randn(2, VOCABULARY, SMALL["hidden_size"])
    axes[:, : len(ROUND)] = scores[:, : len(ROUND)] = 0.0  # of the letters, each its own
    axes[tokens] = scores[tokens] = 0.0
    for axis, (token, following) in enumerate(zip(tokens, tokens[1:] + tokens[:1], strict=True)):
        axes[token, axis] = scores[following, axis] = 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        model.get_input_embeddings().weight.copy_(axes)
        model.get_output_embeddings().weight.copy_(scores)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "<think>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_reasoning_ends_within_a_drafts_window(tree, thinks):
    """Drafts run over the end of the reasoning: the schema holds from there on, in what was drafted and behind it
    (vLLM 36138, 44292, 44297)."""
    sampling = SamplingParams(structured={"json": {"enum": ["no", "abba"]}})
    found = {}
    for drafter in ("none", "ngram"):
        options = {"tree": tree} if drafter == "ngram" else {}
        with specstep.eager(str(thinks), dtype="float32", drafter=drafter, max_seq_len=160, **options) as engine:
            engine.learning = False
            found[drafter] = engine.generate(ASKED, 40, sampling=sampling)
            assert engine.generate(ASKED, 40).text == "ab</think>" * 4, "without a schema it goes on"
    plain, drafted = found["none"], found["ngram"]
    assert drafted.token_ids == plain.token_ids and drafted.finish_reason == "stop"
    thought, mark, answer = drafted.text.partition("</think>")
    assert (thought, mark) == ("ab", "</think>") and json.loads(answer) in ("no", "abba")
    assert drafted.stats["steps"] < len(drafted.token_ids) / 2, "drafts were accepted"


@pytest.fixture(scope="module")
def engine(engine_folder):
    with specstep.load(engine_folder) as opened:
        yield opened


def test_a_stop_id_inside_a_document_does_not_cut_it(engine):
    """One that the grammar does not know (vLLM 49227)."""
    properties = {"x": {"type": "string", "minLength": 2, "maxLength": 6}}
    schema = {"type": "object", "properties": properties, "required": ["x"], "additionalProperties": False}
    sampling = SamplingParams(structured={"json": schema}, logit_bias={B: 100.0})
    free = engine.generate([5, 6], 60, sampling=sampling)
    assert "b" in json.loads(free.text)["x"]
    held = engine.generate([5, 6], 60, sampling=sampling, stop_ids=[B])
    assert held.finish_reason == "stop" and held.token_ids[-1] == B
    assert "b" not in json.loads(held.text.removesuffix("b"))["x"]


def test_a_stop_id_that_the_grammar_forces_is_an_error(engine):
    """Rather than a text that is cut, or one without end (SGLang 31533)."""
    with pytest.raises(InputError, match="structured: expected a grammar that some text keeps, got one that nothing"):
        engine.generate([5, 6], 60, sampling=SamplingParams(structured={"regex": "ab+"}), stop_ids=[A])


def test_nodes_behind_the_end_of_a_grammar():
    """They have a mask, and leave the grammar where it was (SGLang 9187, 15373, llama.cpp 12597, 27619, OpenVINO
    4081)."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
    grammar = Grammar(text, VOCABULARY, [EOS], checked_structured("structured", {"choice": ["ab"]}))
    masks = grammar.masks([EOS])
    past = DraftedTree([A, B, EOS, B, A], [-1, 0, 1, 2, 3])
    for _ in range(2):
        assert [allowed(bits) for bits in masks([A], past)] == [[B], [EOS], [EOS], [EOS], [EOS]]
        fitted = masks.fit([A], past, 4, 4)
        assert fitted.tree == DraftedTree([A, B, EOS], [-1, 0, 1])
    other = DraftedTree([A, A, B, B], [-1, 0, 1, 0])  # nodes that are not allowed, and their children
    assert allowed(masks([A], other)[3]) == [EOS]
    assert allowed(masks([A, B], DraftedTree([B, EOS, B], [-1, 0, 0]))[0]) == [EOS]


PAIR = {
    "type": "object",
    "properties": {"x": {"enum": ["ab", "ba"]}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


def test_drafts_that_do_not_fit_end_no_engine():
    """A drafter that says nothing of the grammar's, in all rows at once (vLLM 27969, 52620)."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})
    pair, found = {"structured": {"json": PAIR}}, []
    for accepts in (lambda *_: 0, lambda *_: 2):
        session = FakeSession(2, follow=lambda tokens: token_of("!"), accepts=accepts, vocabulary=258, stops=(EOS,))
        with Engine(session, text) as engine:
            found.append(engine.generate([[9]] * 4, 60, sampling=[pair, None, pair, pair]))
    plain, drafted = found
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    for each in (drafted[0], *drafted[2:]):
        assert each.text == '{"x":"ab","y":false}' and each.finish_reason == "stop"
        assert each.stats["steps"] < len(each.token_ids), "what the grammar forces was drafted"
    assert drafted[1].text == "!" * 60, "a row beside them is free"


def test_tokens_that_go_past_the_grammar_are_not_allowed():
    """One that begins inside and ends outside, and special ones (llama.cpp 12597)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: index for index, piece in enumerate([*letters, "ab", "abc", "bc"])}
    whole = Tokenizer(models.BPE(vocab=pieces, merges=[("a", "b"), ("ab", "c"), ("b", "c")]))
    whole.pre_tokenizer, whole.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    whole.add_special_tokens([AddedToken(name, special=True) for name in ("</s>", "<unused>", "ab<x>")])
    end, size = whole.token_to_id("</s>"), whole.get_vocab_size()
    text = EngineTokenizer(whole, None, {})
    grammar = Grammar(text, size, [end], checked_structured("structured", {"choice": ["ab", "abd"]}))
    tree = DraftedTree([0, pieces["a"], pieces["bc"], pieces["ab"], pieces["abc"]], [-1, 0, 1, 0, 0])
    bits = grammar.masks([end])([], tree)
    assert set(allowed(bits[0])) <= {pieces["a"], pieces["ab"]}
    assert allowed(bits[3]) == sorted([pieces["d"], end])
    assert grammar.masks([end]).fit([], tree, 4, 2).tree.tokens[1] == pieces["ab"]


def allowed(bits):
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()

"""Tokenizers of GGUF files: how texts are cut, which tokens begin and end them, and which end an answer."""

import pytest
from gguf_files import byte_words
from specstep.compile.gguf.file import GgufFile
from specstep.compile.gguf.metadata import Metadata
from specstep.compile.gguf.pre_tokenizers import PRE_TOKENIZERS
from specstep.compile.gguf.tokenizer import read_tokenizer
from specstep.errors import BuildError

WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁a"]
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
}


def tokenizer_of(keys, rows=400):
    whole = {"general.architecture": "llama"} | {key: value for key, value in keys.items() if value is not None}
    return read_tokenizer(Metadata(GgufFile(None, whole, {}), "tiny.gguf"), rows)


def changed(**keys):
    return byte_words() | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def with_words(*words, kind=3, **keys):
    """The byte tokenizer with words of a type behind its own."""
    base = byte_words(259)
    tokens, types = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    return changed(tokens=[*tokens, *words], token_type=[*types, *[kind] * len(words)], **keys)


def test_jais_2_cuts_spaces_into_runs_of_powers_of_two():
    cut = PRE_TOKENIZERS["jais-2"].build()
    words = [word for word, _ in cut.pre_tokenize_str("a" + 15 * " " + "b 2024")]
    assert words == ["a", 8 * "Ġ", 4 * "Ġ", 2 * "Ġ", "Ġb", "Ġ", "202", "4"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["It", "'s", "Ġ2024", ":", "ĠDon", "'", "T", "!!", "ĊĠĠ", "Ġabc", "12"]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", ":", "ĠDon", "'", "T", "!!", "ĊĠĠ", "Ġabc", "1", "2"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "4", ":", "ĠDon", "'T", "!!Ċ", "ĠĠ", "Ġabc", "12"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", ":", "ĠDon", "'T", "!!Ċ", "ĠĠ", "Ġabc", "1", "2"]),
        ("tekken", ["It", "'s", "Ġ", "2", "0", "2", "4", ":", "ĠDon", "'T", "!!Ċ", "ĠĠ", "Ġabc", "1", "2"]),
        ("deepseek-llm", ["It", "'", "s", "Ġ", "2024", ":", "ĠDon", "'", "T", "!!", "Ċ", "ĠĠ", "Ġabc", "12"]),
        ("deepseek-v3", ["It", "'s", "Ġ", "202", "4", ":", "ĠDon", "'T", "!!Ċ", "ĠĠ", "Ġabc", "12"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_do(pre, words):
    text = "It's 2024: Don'T!!\n   abc12"
    assert [word for word, _ in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)] == words


def test_every_expression_compiles():
    for name, pre in PRE_TOKENIZERS.items():
        cut = [word for word, _ in pre.build().pre_tokenize_str("Grüße, 北京 12345 don't\n\n x")]
        assert len(cut) > 3, name


def test_bos_is_added_as_llama_cpp_adds_it():
    assert tokenizer_of(changed(pre="gpt-2"))[0]("ab").input_ids == [258]
    assert tokenizer_of(changed(pre="llama-bpe"))[0]("ab").input_ids == [0, 258]
    assert tokenizer_of(changed(pre="llama-bpe", add_bos_token=False))[0]("ab").input_ids == [258]
    assert tokenizer_of(changed(add_bos_token=True, add_eos_token=True))[0]("ab").input_ids == [0, 258, 1]
    assert tokenizer_of(PIECES)[0]("ab").input_ids == [1, WORDS.index("▁ab")]
    with pytest.raises(BuildError, match=r"bos_token_id: expected an id, as tokenizer.ggml.add_bos_token is true"):
        tokenizer_of(changed(pre="llama-bpe", bos_token_id=None))


def test_answers_end_with_every_token_that_ends_one():
    words = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<turn>")
    assert tokenizer_of(with_words(*words, eot_token_id=262))[1].stop == (1, 259, 260, 261, 262)
    assert tokenizer_of(with_words("<|end|>"))[1].stop == (1, 259)
    assert tokenizer_of(with_words("<|end|>", "<|return|>", "<|call|>"))[1].stop == (1, 260, 261)
    assert tokenizer_of(with_words("<|file_sep|>", "<|fim_pad|>"))[1].stop == (1, 259, 260)
    with pytest.raises(BuildError, match="eot_token_id: expected an id below 320, got 4000"):
        tokenizer_of(changed(eot_token_id=4000))


def test_special_tokens_are_found_whole():
    tokenizer = tokenizer_of(with_words("<｜User｜>", "<｜end▁of▁sentence｜>", pre="deepseek-llm"))[0]
    assert tokenizer("<｜User｜>ab<｜end▁of▁sentence｜>").input_ids == [259, 258, 260]
    assert tokenizer.decode([259, 258, 260], skip_special_tokens=True) == "ab"


def test_pieces_merge_by_score_and_fall_back_to_bytes():
    tokenizer = tokenizer_of(PIECES)[0]
    ids = tokenizer("ab aé", add_special_tokens=False).input_ids
    assert [WORDS[id] for id in ids] == ["▁ab", "▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab aé"
    bare = tokenizer_of(PIECES | {"tokenizer.ggml.add_space_prefix": False})[0]
    assert [WORDS[id] for id in bare("ab", add_special_tokens=False).input_ids] == ["ab"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (changed(pre="afmoe"), "tokenizer.ggml.pre: expected one of a.x-4.0, .*, got afmoe"),
        (changed(pre=""), "tokenizer.ggml.pre: expected how texts are cut .*, got none: the file was made before May"),
        (changed(token_type=[1, 1]), "tokenizer.ggml.token_type: expected one for each of 320 tokens, got 2"),
        (changed(model="rwkv"), "tokenizer.ggml.model: expected one of llama, gpt2, gemma4, got rwkv"),
        (changed(merges=None), "tokenizer.ggml.merges: expected merges, got none"),
        (changed(tokens=["a", "a"], token_type=None), "tokenizer.ggml.tokens: expected each once, got 'a' twice"),
        (changed(tokens=[str(id) for id in range(500)]), "expected at most the 400 rows of the embedding, got 500"),
        (PIECES | {"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores: expected one for each token, got fewer"),
    ],
)
def test_what_is_not_known_of_a_tokenizer_is_refused(keys, message):
    with pytest.raises(BuildError, match=message):
        tokenizer_of(keys)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", "{{ bos_token }}{{ messages }}"),
        ("{{ bos_token }}a", "{{ bos_token }}a"),
        ("<s>a", "<s>a"),
    ],
)
def test_a_conversation_begins_as_every_prompt_does(template, expected):
    keys = changed(add_bos_token=True) | {"tokenizer.chat_template": template}
    assert tokenizer_of(keys)[0].chat_template == expected
    assert tokenizer_of(keys | {"tokenizer.ggml.add_bos_token": False})[0].chat_template == template


def test_prompts_of_gemma_4_begin_as_it_was_trained_whatever_an_early_file_says():
    for says in (False, True, None):
        assert tokenizer_of(changed(model="gemma4", add_bos_token=says))[1].add_bos


def test_letters_and_their_marks_are_one_character_where_the_model_s_tokenizer_has_it_so():
    apart, together = "cafe\u0301", "caf\u00e9"
    for pre, same in (("qwen2", True), ("command-r", True), ("mpt", True), ("llama-bpe", False)):
        tokenizer = tokenizer_of(changed(pre=pre))[0]
        assert (tokenizer(apart).input_ids == tokenizer(together).input_ids) == same, pre


def test_several_templates_are_kept_by_name():
    keys = changed() | {"tokenizer.chat_template": "a", "tokenizer.chat_template.tools": "b"}
    assert tokenizer_of(keys)[0].chat_template == {"default": "a", "tools": "b"}

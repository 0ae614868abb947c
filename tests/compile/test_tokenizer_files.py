"""Tokenizers of directories without tokenizer.json: the tokens that their own libraries make, or a refusal."""

import base64
import itertools
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import save_model
from specstep.compile.sentencepiece import read_sentencepiece
from specstep.compile.source import load_tokenizer
from specstep.compile.tekken import read_tekken
from specstep.errors import BuildError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

WORDS = ["▁", "a", "b", "c", "n", "ab", "▁a", "abc", "▁ab", "bc", "an", "ana", "▁▁"]
PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3)] + [(f"<0x{byte:02X}>", 6) for byte in range(256)]
PIECES += [("[X]", 4)] + [(word, 1) for word in WORDS]
TEXTS = st.text(st.sampled_from("abcn é\n日"), max_size=12)


def varint(number):
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def write_model(file, pieces=PIECES, trainer=None, normalizer=None):
    """A tokenizer.model; a later piece has a lower score."""
    messages = [
        field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", -float(place)) + field(3, kind)
        for place, (text, kind) in enumerate(pieces)
    ]
    trainer, normalizer = {3: 2, 40: 0, 41: 1, 42: 2} | (trainer or {}), {3: 1, 4: 0} | (normalizer or {})
    messages = [field(1, message) for message in messages]
    for number, fields in ((2, trainer), (3, normalizer)):
        messages.append(field(number, b"".join(field(*item) for item in fields.items())))
    file.write_bytes(b"".join(messages))
    return file


def merged(symbols, score):
    """Of all neighbours that make a word, those of the highest score are joined, the leftmost first, until none do."""
    symbols = list(symbols)
    while True:
        pairs = [(score[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in score]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def as_sentencepiece(text):
    ids = {piece: id for id, (piece, _) in enumerate(PIECES)}
    found = merged("▁" + text.replace(" ", "▁"), {word: -ids[word] for word in WORDS}) if text else []
    return [id for word in found for id in ([ids[word]] if word in ids else [3 + byte for byte in word.encode()])]


@pytest.fixture(scope="module")
def pieces_file(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("pieces") / "tokenizer.model")


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_pieces_are_merged_by_score(pieces_file, text):
    tokenizer = read_sentencepiece(pieces_file, {"add_bos_token": False})
    ids = tokenizer(text)["input_ids"]
    assert ids == as_sentencepiece(text)
    assert tokenizer.decode(ids) == text


def directory(tmp_path, config=None, **changes):
    folder = save_model(tmp_path / "model", vocab_size=300, **changes)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


ADDED = {"273": {"content": "<|im_end|>", "special": True}, "274": {"content": "<think>"}}


@pytest.mark.parametrize("legacy", [True, False])
def test_a_directory_of_pieces_has_its_added_tokens_and_template(tmp_path, legacy):
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "added_tokens_decoder": ADDED}
    folder = directory(tmp_path, config | {"eos_token": "<|im_end|>", "chat_template": "hi"})
    write_model(folder / "tokenizer.model")
    tokenizer, _ = load_tokenizer(str(folder))
    after = as_sentencepiece("a") if legacy else [PIECES.index(("a", 1))]
    assert tokenizer("ab<|im_end|>a")["input_ids"] == [1, *as_sentencepiece("ab"), 273, *after]
    assert tokenizer("<think>")["input_ids"] == [1, 274] and tokenizer("[X]")["input_ids"] == [1, 259]
    assert tokenizer.decode([273, 274], skip_special_tokens=True) == "<think>"
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.chat_template) == (273, 1, "hi")


@pytest.mark.parametrize(
    ("model", "config", "got"),
    [
        ({"trainer": {3: 1}}, {}, r"model_type 2 \(BPE\), got 1"),
        ({"normalizer": {2: b"map"}}, {}, "no precompiled_charsmap, got"),
        ({"normalizer": {4: 1}}, {}, "remove_extra_whitespaces false, got"),
        ({"trainer": {24: 1}}, {}, "treat_whitespace_as_suffix false, got"),
        ({"pieces": [*PIECES, ("odd", 5)]}, {}, "no piece of type UNUSED, got"),
        ({"pieces": [*PIECES, ("▁▁▁", 4)]}, {}, "no user-defined piece with a space, got"),
        ({}, {"tokenizer_class": "T5Tokenizer"}, "a tokenizer of one of gemma, .*, got T5Tokenizer of llama"),
        ({}, {"add_prefix_space": False}, "add_prefix_space True as the model has it, got False"),
        ({}, {"bos_token": "<bos>"}, "a bos_token of the vocabulary, got '<bos>'"),
        ({}, {"added_tokens_decoder": {"280": {"content": "x"}}}, "added token 280 to be None, got 'x'"),
        ({}, {"added_tokens_decoder": {"1": {"content": "x"}}}, "added token 1 to be '<s>', got 'x'"),
        ({}, {"added_tokens_decoder": {"273": {"content": "x", "rstrip": True}}}, "tokens that strip nothing, got 'x'"),
    ],
)
def test_other_pieces_are_refused(tmp_path, model, config, got):
    folder = directory(tmp_path, config)
    write_model(folder / "tokenizer.model", **model)
    with pytest.raises(
        BuildError, match=f"tokenizer.model: expected .*{got}.*; there is no tokenizer.json; take"
    ) as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damaged", [b"", b"AAAA 1\n", b"\x0a\xff", b"\x0a\x02\x0a\xff"])
def test_a_damaged_model_is_refused(tmp_path, damaged):
    folder = directory(tmp_path)
    (folder / "tokenizer.model").write_bytes(damaged)
    with pytest.raises(
        BuildError, match="expected a model of SentencePiece, got a damaged file or one of another kind"
    ):
        load_tokenizer(str(folder))


TOKENS = [bytes([byte]) for byte in range(256)] + [b"ab", b" a", b"bc", "é".encode(), b"abc", b"nan", b"cb"]


def tekken(**changes):
    names = [{"rank": rank, "token_str": name} for rank, name in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    words = [{"rank": rank, "token_bytes": base64.b64encode(word).decode()} for rank, word in enumerate(TOKENS)]
    config = {"pattern": r" ?\p{L}+|\s+|.", "default_vocab_size": 6 + len(TOKENS) - 1, "default_num_special_tokens": 6}
    return {"config": config, "vocab": words, "special_tokens": names} | changes


@given(words=st.lists(st.text("abcné", min_size=1, max_size=8), max_size=3))
@settings(max_examples=200, deadline=None)
def test_tekken_merges_by_the_rank_of_what_is_made(words):
    tokenizer, text = read_tekken(tekken()), " ".join(words)
    rank = {word: number for number, word in enumerate(TOKENS[:-1])}  # a file holds more words than its size
    expected = [1]
    for place, word in enumerate(words):
        data = ((" " if place else "") + word).encode()
        parts = [data] if data in rank else merged([bytes([byte]) for byte in data], {w: -n for w, n in rank.items()})
        expected += [6 + rank[part] for part in parts]
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == text


def test_a_directory_of_tekken_has_its_special_tokens(tmp_path):
    folder = directory(tmp_path)
    (folder / "tekken.json").write_text(json.dumps(tekken()))
    tokenizer, _ = load_tokenizer(str(folder))
    assert tokenizer("[INST]a")["input_ids"] == [1, 3, 6 + ord("a")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 6 + len(TOKENS) - 1)


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"special_tokens": None}, "special_tokens in the file, got none"),
        ({"vocab": tekken()["vocab"][1:]}, "a vocab of ranks in order, with each byte, got another"),
        ({"special_tokens": [{"rank": 9, "token_str": "<s>"}]}, "special_tokens of different ranks below 6"),
        ({"config": {"default_num_special_tokens": 6}}, "default_vocab_size, got none"),
    ],
)
def test_another_tekken_is_refused(tmp_path, changes, got):
    folder = directory(tmp_path)
    (folder / "tekken.json").write_text(json.dumps(tekken(**changes)))
    with pytest.raises(BuildError, match=f"tekken.json: expected {got}"):
        load_tokenizer(str(folder))


def trained(pre_tokenizer):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(["the cat and the hat, don't they? 2024 naïve  words of the 日本"] * 3, trainer)
    return tokenizer


def write_pairs(folder, tokenizer, more=""):
    tokenizer.model.save(str(folder))
    with (folder / "merges.txt").open("a", encoding="utf-8") as file:
        file.write(more)


def test_pairs_are_those_of_the_files(tmp_path):
    original = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    folder = save_model(tmp_path / "model", "GPT2", vocab_size=300)
    write_pairs(folder, original)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer, _ = load_tokenizer(str(folder))
    for text in ("the cat", " don't they?  20\n", "naïve 日本", ""):
        assert tokenizer(text)["input_ids"] == original.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("named", "more", "got"),
    [
        ("LlamaTokenizer", "", "a tokenizer of one of gpt2, .*, got LlamaTokenizer of llama"),
        ("GPT2Tokenizer", "", "got GPT2Tokenizer of llama"),
        ("", "", "got no class of llama"),
    ],
)
def test_pairs_of_another_class_are_refused(tmp_path, named, more, got):
    """transformers makes a tokenizer without a word of them, or one that cuts texts in another way."""
    folder = directory(tmp_path, {"tokenizer_class": named} if named else None)
    write_pairs(folder, trained(pre_tokenizers.ByteLevel()), more)
    with pytest.raises(BuildError, match=f"vocab.json: expected .*{got}"):
        load_tokenizer(str(folder))


def test_pairs_of_unknown_words_are_refused(tmp_path):
    folder = save_model(tmp_path / "model", "GPT2", vocab_size=300)
    write_pairs(folder, trained(pre_tokenizers.ByteLevel()), "zz qq\n")
    with pytest.raises(BuildError, match="merges of two words that make a third, got 'zz qq'"):
        load_tokenizer(str(folder))
    (folder / "merges.txt").unlink()
    with pytest.raises(BuildError, match=r"expected merges.txt beside it, got none"):
        load_tokenizer(str(folder))


def test_a_tokenizer_config_alone_is_refused(tmp_path):
    with pytest.raises(BuildError, match=r"expected one of tokenizer.json, .*, got none beside tokenizer_config.json"):
        load_tokenizer(str(directory(tmp_path, {"tokenizer_class": "CTRLTokenizer"})))


def test_tokens_of_an_older_list_must_be_in_the_config(tmp_path):
    folder = directory(tmp_path, {"added_tokens_decoder": ADDED})
    write_model(folder / "tokenizer.model")
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 273, "<odd>": 275}))
    with pytest.raises(BuildError, match=r"to have '<odd>' of added_tokens.json, got none"):
        load_tokenizer(str(folder))


def test_texts_are_cut_as_the_file_says_whatever_class_a_directory_names(tmp_path, caplog):
    """GPT2Tokenizer of transformers takes words and merges of tokenizer.json alone: digits of SmolLM2 and StarCoder2
    would not be cut."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate([*words, "11", "<s>"])}, [("1", "1")]))
    cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(cuts), decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<s>"])
    save_model(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    own = AutoTokenizer.from_pretrained(str(tmp_path))
    got, _ = load_tokenizer(str(tmp_path))
    assert type(got) is type(own) and "transformers' GPT2Tokenizer has other rules" in caplog.text
    for text in ("11 and 1", "cafe\u0301", "<s>11<s>"):
        assert got(text).input_ids == tokenizer.encode(text).ids
    assert own("11").input_ids != got("11").input_ids and got.decode(got("a 11 \u00e9").input_ids) == "a 11 \u00e9"
    assert got.bos_token_id == tokenizer.token_to_id("<s>")

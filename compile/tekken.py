"""Reads Mistral's `tekken.json`: pairs of bytes, merged by the rank of what they make."""

import base64
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
BYTES = bytes_to_unicode()


def read_tekken(data: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """data: of the file. Each prompt begins with <s>, as Mistral's do. Raises ValueError that says what was expected
    and what is there, or KeyError."""
    config, special = data["config"], data.get("special_tokens")
    if special is None:
        raise ValueError("special_tokens in the file, got none: it was written before they were")
    count = config["default_num_special_tokens"]
    names = {token["rank"]: token["token_str"] for token in special}
    if not all(0 <= rank < count for rank in names) or len(set(names.values())) != len(special):
        raise ValueError(f"special_tokens of different ranks below {count} and names, got others")
    ranked = data["vocab"][: config["default_vocab_size"] - count]
    words = ["".join(BYTES[byte] for byte in base64.b64decode(token["token_bytes"])) for token in ranked]
    if [token["rank"] for token in ranked] != list(range(len(ranked))) or not set(BYTES.values()) <= set(words):
        raise ValueError("a vocab of ranks in order, with each byte, got another")
    return _fast([names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)], words, config["pattern"])


def _fast(special: list[str], words: list[str], pattern: str) -> PreTrainedTokenizerFast:
    """special: tokens that come ahead of the words."""
    ids = {word: id for id, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(words), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    named = {name: token for name, token in NAMED.items() if token in special}
    if "bos_token" in named:
        bos = NAMED["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, ids[bos])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """All pairs of words that make a word, in the order of what they make."""
    known = set(words)
    return [
        (word[:at], word[at:])
        for word in words
        for at in range(1, len(word))
        if word[:at] in known and word[at:] in known
    ]

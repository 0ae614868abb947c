"""Special tokens of a GGUF file: which there are, which begin and end a text, and which end an answer.

As llama.cpp has it (src/llama-vocab.cpp), but for two things. Where a file of BPE names no token that ends a text,
llama.cpp takes id 11, a comma in GPT-2's vocabulary; here there is none. And `</s>` ends an answer there even where it
is an ordinary word of a vocabulary, as in Qwen's: here only where it is a token that controls.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import BuildError
from .metadata import Metadata

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens
DEFAULTS: dict[str, dict[str, int]] = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {}, "gemma4": {}}
ALWAYS_BEGIN = ("gemma4",)  # kinds whose prompts begin with the token for it: early files say that they do not
# Tokens that end an answer whatever the file says of them, and those that end a turn.
ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
FILL_ENDS = {
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}


class SpecialTokens(NamedTuple):
    """ids: named tokens, of `bos`, `eos`, `unknown` and `padding` those that there are. stop: ids that end an answer,
    the end of a text first. add_bos, add_eos: whether a prompt begins and ends with them."""

    ids: dict[str, int]
    stop: tuple[int, ...]
    add_bos: bool
    add_eos: bool


def special_tokens(
    metadata: Metadata, kind: str, tokens: list[str], types: Sequence[int], adds_bos: bool
) -> SpecialTokens:
    """kind: the tokenizer's, of DEFAULTS. types: of the tokens. adds_bos: whether a file adds the token that begins a
    text if it does not say. Raises BuildError."""
    ids: dict[str, int] = DEFAULTS[kind] | _named(metadata, ("bos", "eos", "unknown", "padding"), len(tokens))
    ids = {name: id for name, id in ids.items() if id < len(tokens)}
    flags = {
        "bos": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) or kind in ALWAYS_BEGIN,
        "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, adds in flags.items():
        if adds and name not in ids:
            raise BuildError(
                f"model: {metadata.name}: tokenizer.ggml.{name}_token_id: expected an id, as "
                f"tokenizer.ggml.add_{name}_token is true, got none"
            )
    return SpecialTokens(ids, _stop_ids(metadata, tokens, types, ids), flags["bos"], flags["eos"])


def _named(metadata: Metadata, names: tuple[str, ...], count: int) -> dict[str, int]:
    found = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    for name, id in found.items():
        if id is not None and not (isinstance(id, int) and 0 <= id < count):
            raise BuildError(
                f"model: {metadata.name}: tokenizer.ggml.{name}_token_id: expected an id below {count}, got {id}"
            )
    return {name: id for name, id in found.items() if id is not None}


def _stop_ids(metadata: Metadata, tokens: list[str], types: Sequence[int], ids: dict[str, int]) -> tuple[int, ...]:
    """Every token that ends an answer: by its key, and by its text."""
    numbers = {token: id for id, token in enumerate(tokens)}
    ends = {numbers[token] for token in ENDS if token in numbers}
    if "</s>" in numbers and types[numbers["</s>"]] == CONTROL:
        ends.add(numbers["</s>"])
    keyed = _named(metadata, ("eot", "eom", *FILL_ENDS), len(tokens))
    ends |= set(keyed.values())
    for name, texts in FILL_ENDS.items():
        if name not in keyed:
            ends |= set(sorted(numbers[text] for text in texts if text in numbers)[:1])
    words = {tokens[id] for id in ends}
    if "<|end|>" in words and ({"<|return|>", "<|call|>"} <= words or words >= {"<|calls|>", "<|flush|>"}):
        ends.discard(numbers["<|end|>"])  # it ends a message of several
    first = [ids["eos"]] if "eos" in ids else []
    return (*first, *sorted(ends - {*first}))

"""The tokenizer of a GGUF file, as transformers' fast one."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from ...errors import BuildError
from .metadata import Metadata
from .pre_tokenizers import PRE_TOKENIZERS
from .special_tokens import CONTROL, DEFAULTS, ENDS, UNKNOWN, USER_DEFINED, SpecialTokens, special_tokens

SPACE = "▁"  # what stands for a space in a vocabulary of SentencePiece
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def read_tokenizer(metadata: Metadata, rows: int) -> tuple[PreTrainedTokenizerFast | None, SpecialTokens]:
    """The tokenizer, None where the file has none, and its special tokens. rows: of the embedding. Raises
    BuildError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None, SpecialTokens({}, (), False, False)
    if kind not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.model: expected one of {known}, got {kind}")
    tokens = _tokens(metadata, rows)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) < len(tokens):
        raise BuildError(
            f"model: {metadata.name}: tokenizer.ggml.token_type: expected one for each of {len(tokens)} tokens, "
            f"got {len(types)}"
        )
    build = {"llama": _sentence_pieces, "gpt2": _byte_pairs, "gemma4": _spaced_pairs}[kind]
    tokenizer, adds_bos = build(metadata, tokens, types)
    special = special_tokens(metadata, kind, tokens, types, adds_bos)
    _add_tokens(tokenizer, tokens, types, metadata)
    tokenizer.post_processor = _around(tokens, special)
    named = {NAMES[name]: tokens[id] for name, id in special.ids.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
    fast.chat_template = _chat_template(metadata, tokens[special.ids["bos"]] if special.add_bos else None)
    return fast, special


def _tokens(metadata: Metadata, rows: int) -> list[str]:
    """The text of each id. Raises BuildError."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.tokens: expected words, got none")
    tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    if len(tokens) > rows:
        raise BuildError(
            f"model: {metadata.name}: tokenizer.ggml.tokens: expected at most the {rows} rows of the embedding, got "
            f"{len(tokens)} tokens"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.tokens: expected each once, got {twice!r} twice")
    return tokens


def _byte_pairs(metadata: Metadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """GPT-2's: words of bytes, merged by rank."""
    pre = metadata.get("tokenizer.ggml.pre", "")
    if not pre:
        raise BuildError(
            f"model: {metadata.name}: tokenizer.ggml.pre: expected how texts are cut into words, got none: the file "
            "was made before May 2024; convert the model again"
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.pre: expected one of {known}, got {pre}")
    cut = PRE_TOKENIZERS[pre]
    metadata.get("tokenizer.ggml.scores")  # ranks are the merges'; Mistral's converter writes zeros
    model = models.BPE(vocab=_numbered(tokens), merges=_merges(metadata), ignore_merges=cut.whole)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = cut.build(), decoders.ByteLevel()
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    if metadata.get("tokenizer.ggml.add_space_prefix", False):
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.add_space_prefix: expected false, got true")
    return tokenizer, cut.adds_bos


def _spaced_pairs(metadata: Metadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """Gemma 4's: the whole text, spaces written as SPACE, merged by rank; only lines are cut."""
    metadata.get("tokenizer.ggml.pre")  # one kind has one
    metadata.get("tokenizer.ggml.scores")  # ranks are the merges'
    metadata.get("tokenizer.ggml.add_space_prefix")
    tokenizer = Tokenizer(
        models.BPE(vocab=_numbered(tokens), merges=_merges(metadata), byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, True


def _sentence_pieces(metadata: Metadata, tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's: the whole text, spaces written as SPACE, pairs merged to the word of the highest score."""
    if (pre := metadata.get("tokenizer.ggml.pre", "default")) != "default":
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.pre: expected default beside llama, got {pre}")
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(tokens):
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.scores: expected one for each token, got fewer")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=_numbered(tokens),
        merges=_merges_by_score(tokens, scores, types),
        unk_token=tokens[unknown] if unknown < len(tokens) else None,
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer, True


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """The pairs, the first before the second: a space divides them, but it may be the first part itself."""
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise BuildError(f"model: {metadata.name}: tokenizer.ggml.merges: expected merges, got none")
    places = [merge.find(" ", 1) for merge in merges]
    return [(merge[:at], merge[at + 1 :]) for merge, at in zip(merges, places, strict=True)]


def _merges_by_score(tokens: list[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """All pairs of words that make a word: those of a higher score first."""
    words = {token for token, kind in zip(tokens, types, strict=False) if kind not in (CONTROL, UNKNOWN)}
    pairs = [
        (-score, token[:at], token[at:])
        for token, score in zip(tokens, scores, strict=False)
        if token in words
        for at in range(1, len(token))
        if token[:at] in words and token[at:] in words
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: Sequence[int], metadata: Metadata) -> None:
    """Tokens that are found in a text as they stand, ahead of all else. Those that control have no text of their own.
    Phi-3's take the spaces that follow them along, which no key says."""
    strips = metadata.architecture == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    kept = {"<unk>", "<s>", "<|endoftext|>"}
    control = {CONTROL, UNKNOWN}
    added = [
        AddedToken(
            token, special=kind in control or token in ENDS, normalized=False, rstrip=strips and token not in kept
        )
        for token, kind in zip(tokens, types, strict=False)
        if kind in (*control, USER_DEFINED) or token in ENDS
    ]
    tokenizer.add_tokens(added)


def _around(tokens: list[str], special: SpecialTokens) -> Any:
    """The tokens that begin and end a prompt."""
    first = [tokens[special.ids["bos"]]] if special.add_bos else []
    last = [tokens[special.ids["eos"]]] if special.add_eos else []
    if not first and not last:
        return None
    ids = {token: special.ids[name] for name, found in (("bos", first), ("eos", last)) for token in found}
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=list(ids.items()),
    )


def _chat_template(metadata: Metadata, bos: str | None) -> Any:
    """The template, or several by name. bos: the token that every prompt begins with, if there is one: a conversation
    does so, too, where the template leaves it to the tokenizer."""
    named = "tokenizer.chat_template."
    templates = {key[len(named) :]: metadata.get(key) for key in metadata.values if key.startswith(named)}
    default = metadata.get("tokenizer.chat_template")
    templates |= {"default": default} if default else {}
    for name, template in templates.items():
        if bos is not None and "bos_token" not in template and bos not in template:
            templates[name] = "{{ bos_token }}" + template
    return templates.get("default") if set(templates) <= {"default"} else templates

"""The tokenizer of a directory: tokenizer.json, or the files that came before it, which are read here or refused.

transformers makes a fast tokenizer of those, too, but by the class that the directory names, whatever the files hold:
some of them lose merges, spaces or the whole vocabulary without a word.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import BuildError, one_line
from .json_object import read_object
from .sentencepiece import read_sentencepiece
from .tekken import read_tekken

logger = logging.getLogger(__name__)
NO_CODE = {"trust_remote_code": False}  # of a model's own; without it transformers asks at the terminal
FAST, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEKKEN = "tekken.json"
OLDER = (TEKKEN, "tokenizer.model", "vocab.json")
RULES = ("normalizer", "pre_tokenizer", "decoder")
FLAGS = ("byte_fallback", "ignore_merges", "fuse_unk", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
# Of vocab.json and merges.txt: classes that cut texts as their models do, and those models.
PAIRS = {
    "GPT2Tokenizer": ("gpt2", "gpt_neo", "gptj"),
    "Qwen2Tokenizer": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
# Of tokenizer.model.
PIECES = {
    "LlamaTokenizer": ("llama", "mistral", "mixtral"),
    "GemmaTokenizer": ("gemma", "gemma2", "gemma3_text"),
}
MAKE_ONE = f"there is no {FAST}; take the one of the model's page, or save one with transformers and sentencepiece"


def read_tokenizer_files(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a directory without tokenizer.json; None where it has no file of one. Raises BuildError."""
    found = next((name for name in OLDER if (folder / name).is_file()), None)
    if found is None and (folder / CONFIG).is_file():
        raise BuildError(f"model: {folder}: expected one of {', '.join((FAST, *OLDER))}, got none beside {CONFIG}")
    if found is None:
        return None
    settings = read_object(folder / "special_tokens_map.json") | read_object(folder / CONFIG)
    model_type = read_object(folder / "config.json").get("model_type")
    try:
        if found == TEKKEN:
            tokenizer = read_tekken(read_object(folder / found))
        elif found == "tokenizer.model":
            _check_class(settings, model_type, PIECES)
            _check_added(read_object(folder / "added_tokens.json"), settings)
            tokenizer = read_sentencepiece(folder / found, settings)
        else:
            tokenizer = _pairs(folder, _check_class(settings, model_type, PAIRS))
    except (ValueError, KeyError, TypeError) as error:
        said = f"{error.args[0]}, got none" if isinstance(error, KeyError) else one_line(error)
        raise BuildError(f"model: {folder / found}: expected {said}; {MAKE_ONE}") from None
    template = folder / "chat_template.jinja"
    older = settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
    tokenizer.chat_template = template.read_text(encoding="utf-8") if template.is_file() else older
    return tokenizer


def keep_to_file(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Have a tokenizer normalise, cut, merge and join texts as tokenizer.json says. Many classes of transformers take
    the words of the file alone, and put their own rules in place of its others. Where transformers knows that an
    expression of Mistral's may be wrong in it, that of tekken.json stands in its place, if there is one."""
    own, said = tokenizer.backend_tokenizer, Tokenizer.from_file(str(folder / FAST))
    if _rules(own) != _rules(said):
        name = type(tokenizer).__name__
        logger.warning("tokenizer: texts are cut as %s says; transformers' %s has other rules", FAST, name)
        whole = json.loads(own.to_str()) | {part: json.loads(said.to_str())[part] for part in (*RULES, "model")}
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(whole))
    if getattr(tokenizer, "fix_mistral_regex", None) is False:
        if (folder / TEKKEN).is_file():
            cuts = read_tekken(read_object(folder / TEKKEN)).backend_tokenizer.pre_tokenizer
            tokenizer.backend_tokenizer.pre_tokenizer = cuts
        else:
            logger.warning(
                "tokenizer: %s may cut texts otherwise than Mistral's models do; put their %s beside it", FAST, TEKKEN
            )


def _rules(tokenizer: Tokenizer) -> list[Any]:
    """What a tokenizer does to texts, but for its words."""
    parts = [getattr(tokenizer, part) for part in RULES]
    flags = [getattr(tokenizer.model, flag, None) for flag in FLAGS]
    return [type(tokenizer.model), *flags, *(part and part.__getstate__() for part in parts)]


def _check_class(settings: Mapping[str, Any], model_type: Any, known: Mapping[str, tuple[str, ...]]) -> str:
    """The class of a tokenizer: the one that the config names, or that of the model. Raises ValueError."""
    named = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    models = {name: models for name, models in known.items() if named in (name, "")}
    found = next((name for name, models in models.items() if model_type in models), None)
    if found is None:
        all_models = ", ".join(sorted(model for models in known.values() for model in models))
        raise ValueError(f"a tokenizer of one of {all_models}, got {named or 'no class'} of {model_type}")
    return found


def _check_added(older: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """older: added_tokens.json, which does not say which tokens are special. Raises ValueError."""
    known = {token["content"] for token in (settings.get("added_tokens_decoder") or {}).values()}
    if odd := sorted(older.keys() - known):
        raise ValueError(f"added_tokens_decoder of {CONFIG} to have {odd[0]!r} of added_tokens.json, got none")


def _pairs(folder: Path, name: str) -> Any:
    """Pairs of bytes, merged by rank, as transformers reads them. Raises ValueError."""
    vocab = read_object(folder / "vocab.json")
    if not (folder / "merges.txt").is_file():
        raise ValueError("merges.txt beside it, got none")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
    odd = next((pair for pair in pairs if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()), None)
    if odd is not None:  # the library would panic
        raise ValueError(f"merges of two words that make a third, got {' '.join(odd)!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, **NO_CODE)
    except Exception as error:  # loaders raise anything
        raise ValueError(f"a tokenizer, got {one_line(error)}") from None
    got = tokenizer.get_vocab()
    if type(tokenizer).__name__ != name or any(got.get(word) != id for word, id in vocab.items()):
        raise ValueError(f"the words of a {name}, got a {type(tokenizer).__name__} with others")
    return tokenizer

"""Count tables on disk: one safetensors file, whose header names the corpus and the tokenizer.

bigram.tokens [R1] int32, bigram.entries [R1, K] int32: a row for each token that has continuations
trigram.pairs [R2, 2] int32, trigram.entries [R2, K] int32: entries as `graphs.drafters.ngram_tables` packs them
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ...errors import BuildError
from ...graphs.drafters.ngram_tables import NgramTables
from ...kernels.ngram.tables import EMPTY, LEVELS
from ...runtime.learned import vocabulary_hash
from ...user_cache import keep
from ..source import Source

FORMAT = "specstep.ngram.1"
SHAPES = {"bigram.tokens": 1, "bigram.entries": 2, "trigram.pairs": 2, "trigram.entries": 2}
SHIPPED = Path(__file__).parent / "data"


def tokenizer_hash(tokenizer: Any) -> str:
    """Equal for two tokenizers exactly when the same ids stand for the same tokens."""
    return vocabulary_hash(tokenizer.get_vocab())


def is_ngram_file(name: str) -> bool:
    """Whether a drafter's name is a file of count tables, of this format or another version of it."""
    path = Path(name).expanduser()
    return path.is_file() and _metadata(path).get("format", "").startswith("specstep.ngram.")


def shipped_tables(target: Source) -> Path | None:
    """The tables in this package that were counted for a target's token ids, if there are any."""
    if target.tokenizer is None:
        return None
    wanted = tokenizer_hash(target.tokenizer)
    files = sorted(SHIPPED.glob("*.safetensors"))
    return next((path for path in files if _metadata(path).get("tokenizer") == wanted), None)


def load_tables(name: str | Path, target: Source) -> NgramTables:
    """Tables for a target. Raises BuildError when they are of another vocabulary or damaged."""
    path = Path(name).expanduser()
    header = _metadata(path)
    if header.get("format") != FORMAT:
        raise BuildError(f"drafter: {path}: format: expected {FORMAT}, got {header.get('format')}; count again")
    vocabulary = target.model.get_output_embeddings().weight.shape[0]
    if "tokenizer" in header and target.tokenizer and header["tokenizer"] != tokenizer_hash(target.tokenizer):
        raise BuildError(
            f"drafter: {path}: expected tables of {target.name}'s tokenizer, got those of {header.get('model')}; "
            f"count again with --model {target.name}"
        )
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    _check(path, tensors, vocabulary)
    width = tensors["bigram.entries"].shape[1]
    bigrams = torch.full((vocabulary, width), EMPTY, dtype=torch.int32)
    bigrams[tensors["bigram.tokens"].long()] = tensors["bigram.entries"]
    try:
        return NgramTables(bigrams, tensors["trigram.pairs"], tensors["trigram.entries"])
    except ValueError as error:
        raise BuildError(f"drafter: {path}: {error}") from None


def save_tables(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> int:
    """Write a file whole or not at all -> its size in bytes. Raises BuildError when it cannot be written."""
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {"format": FORMAT} | dict(about))
    try:
        keep(path, data)
    except OSError as error:
        raise BuildError(f"output: {path}: could not be written: {error.strerror or error}") from None
    return len(data)


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _check(path: Path, tensors: dict[str, Tensor], vocabulary: int) -> None:
    got = {name: tensor.dim() for name, tensor in tensors.items() if tensor.dtype == torch.int32}
    if got != SHAPES:
        raise BuildError(f"drafter: {path}: expected int32 tensors of these dimensions: {SHAPES}, got {got}")
    for name, tensor in tensors.items():
        ids = tensor // LEVELS if name.endswith("entries") else tensor
        least = EMPTY if name.endswith("entries") else 0
        odd = ids[(ids < least) | (ids >= vocabulary)]
        if odd.numel():
            raise BuildError(
                f"drafter: {path}: {name}: expected token ids below the target's vocabulary of {vocabulary}, got "
                f"{int(odd[0])}"
            )
    rows = [(tensors[kind].shape[0], tensors[f"{kind.split('.')[0]}.entries"].shape) for kind in SHAPES]
    if any(count != shape[0] or shape[1] != rows[0][1][1] or shape[1] == 0 for count, shape in rows):
        raise BuildError(f"drafter: {path}: expected as many rows as keys and equal widths, got {rows}")

"""A data directory: token sequences of one tokenizer and, where kept, the target's hidden states, in shards.

data.json                 format version, whose tokens and hidden states these are, the finished shards
shard-00000.safetensors   tokens [T] int32, lengths [n] int32, prompts [n] int32 (tokens at the start that are prompt
                          only), hidden [T, L*H] bfloat16 (inputs of the named layers, side by side), last [T, H]
                          bfloat16 (the final hidden state, normed); the last two only where hidden states are kept

Letters: T tokens of a shard, or of a sequence, n sequences, L named layers, H hidden size.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import InputError

FORMAT_VERSION = 1
MANIFEST = "data.json"
AGAIN = "collect the data again with `specstep collect`"


@dataclass(frozen=True)
class Shard:
    """A finished shard: its file, what it holds, and the size of the file."""

    file: str
    sequences: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class DataManifest:
    """The whole of data.json. tokenizer: what `ngram_file.tokenizer_hash` says of it, None where the model has none;
    hidden_size: H, and hidden_layers: the layers whose inputs are kept, None and empty where no hidden states are."""

    model: str
    vocab_size: int
    tokenizer: str | None = None
    hidden_size: int | None = None
    hidden_layers: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def shapes(self, sequences: int, tokens: int) -> dict[str, list[int]]:
        """The tensors of a shard with so many sequences and tokens."""
        shapes = {"tokens": [tokens], "lengths": [sequences], "prompts": [sequences]}
        if self.hidden_size is not None:
            shapes["hidden"] = [tokens, len(self.hidden_layers) * self.hidden_size]
            shapes["last"] = [tokens, self.hidden_size]
        return shapes

    def check_same(self, place: str, vocab_size: int, tokenizer: str | None, hidden_size: int | None = None) -> None:
        """Refuse data of another vocabulary, another tokenizer or, where both are known, another hidden size. Raises
        InputError."""
        expected = {"vocab_size": vocab_size, "tokenizer": tokenizer, "hidden_size": hidden_size}
        for field, value in expected.items():
            got = getattr(self, field)
            if got != value and (field == "vocab_size" or None not in (got, value)):
                raise InputError(
                    f"{place}: {field}: expected the model's {_short(value)}, got {_short(got)}, of {self.model}; name "
                    "that model or collect the data again"
                )


def read_manifest(folder: str | Path) -> DataManifest:
    """Read data.json. Raises InputError when there is none, or when it is not of this format version."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise InputError(f"data: expected a directory with {MANIFEST}, got {folder}; make one with `specstep collect`")
    try:
        entries = json.loads(path.read_text())
        if entries["format_version"] != FORMAT_VERSION:
            got = entries["format_version"]
            raise InputError(f"{path}: format_version: expected {FORMAT_VERSION}, got {got!r}; {AGAIN}")
        shards = tuple(Shard(**shard) for shard in entries["shards"])
        return DataManifest(**(entries | {"shards": shards, "hidden_layers": tuple(entries["hidden_layers"])}))
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: expected a manifest of collected data, got {error!r}; {AGAIN}") from None


class Example(NamedTuple):
    """A sequence: tokens [T] int32, how many of them at the start are prompt only, and where kept hidden [T, L*H] and
    last [T, H] bfloat16."""

    tokens: Tensor
    prompt: int
    hidden: Tensor | None
    last: Tensor | None


class Data:
    """A data directory to read: `len(data)` sequences, `data[i]` reads one. Every shard is checked when it is opened;
    hidden states are read from the mapped file when a sequence is asked for."""

    def __init__(self, folder: str | Path):
        """Raises InputError naming what is missing, truncated, empty or out of range."""
        self.folder, self.manifest = Path(folder), read_manifest(folder)
        if not self.manifest.shards:
            raise InputError(f"{folder}: expected at least one finished shard, got none; {AGAIN}")
        checked = [self._check(shard) for shard in self.manifest.shards]
        self.lengths = torch.cat([lengths for lengths, _ in checked])  # [n] int64, of all shards in order
        self.prompts = torch.cat([prompts for _, prompts in checked])  # [n] int64
        first = torch.tensor([0, *(shard.sequences for shard in self.manifest.shards)]).cumsum(0)
        self._first = first[:-1]  # each shard's first sequence
        # Where each sequence starts in its shard.
        self._starts = torch.cat([lengths.cumsum(0) - lengths for lengths, _ in checked])
        self._open = functools.lru_cache(maxsize=32)(self._open)  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def texts(self) -> Iterator[tuple[Tensor, int]]:
        """Tokens [T] and prompt of each sequence; hidden states are not read."""
        first = 0
        for shard in self.manifest.shards:
            part = slice(first, first + shard.sequences)
            tokens = self._open(shard.file).get_tensor("tokens")
            yield from zip(tokens.split(self.lengths[part].tolist()), self.prompts[part].tolist(), strict=True)
            first += shard.sequences

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(torch.searchsorted(self._first, index, right=True)) - 1
        file = self._open(self.manifest.shards[shard].file)
        start, length = int(self._starts[index]), int(self.lengths[index])
        names = list(self.manifest.shapes(0, 0))
        parts = {name: file.get_slice(name)[start : start + length] for name in names if name not in SMALL}
        return Example(parts["tokens"], int(self.prompts[index]), parts.get("hidden"), parts.get("last"))

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: expected a shard, got {error}; {AGAIN}") from None

    def _check(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Compare a shard with what the manifest says of it -> its lengths and prompts."""
        path = self.folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            got = "none" if size is None else f"{size} bytes"
            raise InputError(f"{path}: expected a shard of {shard.bytes} bytes, got {got}; copy it again or {AGAIN}")
        if not shard.sequences:
            raise InputError(f"{path}: expected at least one sequence, got an empty shard; {AGAIN}")
        file, wanted = self._open(shard.file), self.manifest.shapes(shard.sequences, shard.tokens)
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
        if shapes != wanted:
            raise InputError(f"{path}: expected tensors of shapes {wanted}, got {shapes}; {AGAIN}")
        tokens, lengths, prompts = (file.get_tensor(name).long() for name in ("tokens", "lengths", "prompts"))
        if lengths.sum() != shard.tokens or (lengths < 1).any() or (prompts < 0).any() or (prompts > lengths).any():
            raise InputError(
                f"{path}: lengths: expected a sum of {shard.tokens} tokens and prompts inside, got {int(lengths.sum())}"
            )
        odd = tokens[(tokens < 0) | (tokens >= self.manifest.vocab_size)]
        if odd.numel():
            most = self.manifest.vocab_size - 1
            raise InputError(
                f"{path}: tokens: expected ids from 0 to {most}, got {int(odd[0])}: ids of another tokenizer? {AGAIN}"
            )
        return lengths, prompts


SMALL = ("lengths", "prompts")  # tensors with an entry per sequence; the others have one per token


def _short(value: object) -> str:
    return f"{value[:12]}…" if isinstance(value, str) else str(value)

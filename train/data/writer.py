"""Write a data directory shard by shard: whatever happens, finished shards stay and nothing is there twice."""

import dataclasses
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError
from torch import Tensor

from ...compile.swap import sync_file
from ...compile.tensors_file import save_tensors
from ...errors import InputError
from .reader import MANIFEST, DataManifest, Example, Shard, read_manifest

SHARD_TOKENS = 1 << 15  # what a killed process loses at most: minutes of work


class DataWriter:
    """Adds sequences to a data directory, new or begun before. A context manager: leaving it, by an error or not,
    writes what was added.

    A shard is written under a temporary name, synced and renamed, then so is the manifest. A file that the manifest
    does not name is of a write that was interrupted, and is written over.
    """

    def __init__(self, folder: str | Path, manifest: DataManifest, shard_tokens: int = SHARD_TOKENS):
        """manifest: without shards. Raises InputError for a directory that holds something else or data of another
        kind, or that another process is writing to."""
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        self._lock = self._locked()
        try:
            self.manifest = self._begin(manifest)
        except BaseException:
            os.close(self._lock)
            raise
        self._waiting: list[Example] = []
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens added so far, those of earlier runs and those not written yet included."""
        return self._tokens + sum(shard.tokens for shard in self.manifest.shards)

    @property
    def sequences(self) -> int:
        """Sequences added so far."""
        return len(self._waiting) + sum(shard.sequences for shard in self.manifest.shards)

    def add(
        self, tokens: Sequence[int] | Tensor, prompt: int, hidden: Tensor | None = None, last: Tensor | None = None
    ) -> None:
        """Add a sequence: tokens [T], hidden [T, L*H] and last [T, H] where the manifest names a hidden size. Writes a
        shard when enough is waiting. Raises InputError for what does not fit the manifest and for a full disk."""
        ids = torch.as_tensor(tokens, dtype=torch.int32)
        if not len(ids) or not 0 <= prompt <= len(ids):
            raise InputError(f"sequence: expected tokens and a prompt inside, got {len(ids)} and a prompt of {prompt}")
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.manifest.vocab_size:
            most, odd = self.manifest.vocab_size - 1, int(ids.max() if ids.min() >= 0 else ids.min())
            raise InputError(f"sequence: expected token ids from 0 to {most}, got {odd}: ids of another tokenizer?")
        given = {"hidden": hidden, "last": last}
        shapes = {name: list(tensor.shape) for name, tensor in given.items() if tensor is not None}
        wanted = {name: shape for name, shape in self.manifest.shapes(1, len(ids)).items() if name in given}
        if shapes != wanted:
            raise InputError(f"hidden states: expected shapes {wanted}, got {shapes}; is it the model of {MANIFEST}?")
        parts = (None if tensor is None else tensor.to(torch.bfloat16) for tensor in (hidden, last))
        self._waiting.append(Example(ids, prompt, *parts))
        self._tokens += len(ids)
        if self._tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting as a shard, and the manifest that names it. Raises InputError when it cannot be."""
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if not waiting:
            return
        name = f"shard-{len(self.manifest.shards):05}.safetensors"
        tensors = {
            "tokens": torch.cat([example.tokens for example in waiting]),
            "lengths": torch.tensor([len(example.tokens) for example in waiting], dtype=torch.int32),
            "prompts": torch.tensor([example.prompt for example in waiting], dtype=torch.int32),
        }
        if self.manifest.hidden_size is not None:
            for field in ("hidden", "last"):
                tensors[field] = torch.cat([getattr(example, field) for example in waiting])
        work = self.folder / f"{name}.tmp"
        try:
            save_tensors(tensors, work)
            shard = Shard(name, len(waiting), len(tensors["tokens"]), work.stat().st_size)
            _put(work, self.folder / name)
            self._write_manifest(dataclasses.replace(self.manifest, shards=(*self.manifest.shards, shard)))
        except (OSError, SafetensorError) as error:
            work.unlink(missing_ok=True)
            raise self._unwritable(error) from None

    def _locked(self) -> int:
        """A descriptor of the directory, made if need be, that no other process holds until it is closed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InputError(f"output: {self.folder}: expected no other writer, got one at work; wait for it") from None
        return lock

    def _begin(self, manifest: DataManifest) -> DataManifest:
        """The manifest that is there, or the new one once it is."""
        if (self.folder / MANIFEST).is_file():
            there = read_manifest(self.folder)
            for field in ("model", "vocab_size", "tokenizer", "hidden_size", "hidden_layers"):
                expected, got = getattr(there, field), getattr(manifest, field)
                if expected != got:
                    raise InputError(
                        f"output: {self.folder}: {field}: expected {expected}, as the data there has, got {got}; use "
                        "another directory, or the model and options it was begun with"
                    )
            return there
        if any(path.name != f"{MANIFEST}.tmp" for path in self.folder.iterdir()):
            raise InputError(
                f"output: expected a new path or collected data, got {self.folder}, which holds something else"
            )
        try:
            return self._write_manifest(manifest)
        except OSError as error:
            raise self._unwritable(error) from None

    def _write_manifest(self, manifest: DataManifest) -> DataManifest:
        work = self.folder / f"{MANIFEST}.tmp"
        try:
            work.write_text(manifest.to_json())
            _put(work, self.folder / MANIFEST)
        except OSError:
            work.unlink(missing_ok=True)
            raise
        self.manifest = manifest
        return manifest

    def _unwritable(self, error: Exception) -> InputError:
        reason = getattr(error, "strerror", None) or error
        kept = sum(shard.tokens for shard in self.manifest.shards) if hasattr(self, "manifest") else 0
        return InputError(
            f"output: {self.folder}: could not be written: {reason}; {kept:,} tokens in finished shards are kept: make "
            "room and run the same command again"
        )

    def __enter__(self) -> "DataWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.flush()
        finally:
            os.close(self._lock)


def _put(work: Path, path: Path) -> None:
    """Give a finished file its name, surely: its bytes are on the disk before, the name is after."""
    sync_file(work)
    os.replace(work, path)
    sync_file(path.parent)

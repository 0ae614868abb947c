"""Where an interrupted training run goes on from: one file in the output folder, replaced as a whole."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from .optimizer import Optimizer

FILE = "checkpoint.pt"


class Checkpoint:
    """The checkpoint of a run in its output folder. `run` says what makes two runs the same."""

    def __init__(self, folder: Path, run: dict[str, Any]):
        self.path, self.run = folder / FILE, run

    def restore(self, drafter: nn.Module, optimizer: Optimizer, history: list[dict[str, Any]]) -> int:
        """Fill drafter, optimizer and history -> the steps already made, 0 where there is no checkpoint. Raises
        InputError for a checkpoint that cannot be read or is of another run."""
        if not self.path.is_file():
            return 0
        again = f"remove {self.path} or choose another output"
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            run, step = saved["run"], int(saved["step"])
        except Exception as error:  # the loader raises anything
            raise InputError(f"{self.path}: expected a checkpoint, got {type(error).__name__}; {again}") from None
        other = sorted(name for name in {*run, *self.run} if run.get(name) != self.run.get(name))
        if other:
            began, now = run.get(other[0]), self.run.get(other[0])
            raise InputError(f"{self.path}: {other[0]}: expected {began!r}, as the run began, got {now!r}; {again}")
        drafter.load_state_dict(saved["drafter"])
        optimizer.load(saved["optimizer"])
        history[:] = saved["history"]
        return step

    def save(self, drafter: nn.Module, optimizer: Optimizer, history: list[dict[str, Any]], step: int) -> None:
        """Write it beside the old one, then take its place. Raises InputError when the disk is full."""
        content = {"run": self.run, "step": step, "drafter": drafter.state_dict(), "history": history}
        fresh = self.path.with_suffix(".new")
        try:
            with fresh.open("wb") as file:
                torch.save(content | {"optimizer": optimizer.state()}, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
            fresh.unlink(missing_ok=True)
            raise InputError(
                f"{self.path}: expected room for a checkpoint, got {error}; the last one is kept"
            ) from None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

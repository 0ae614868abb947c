"""Runs a function in a forked process, which shares this one's memory."""

import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ...errors import BuildError
from ...progress import OnProgress, silent

OBJECTS = 100_000  # made between two collections of garbage: a compile makes millions, and few are in cycles


class Forked:
    """A function that runs in a process of its own. It is given a `report` that speaks to whoever waits."""

    def __init__(self, name: str, function: Callable[[OnProgress], Any]):
        fork = multiprocessing.get_context("fork")
        self.name = name
        self.told, sender = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self._run, args=(function, sender), daemon=True)
        self.process.start()
        sender.close()

    @staticmethod
    def _run(function: Callable[[OnProgress], Any], sender: Connection) -> None:
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        warnings.simplefilter("ignore")  # the compiler's about itself
        _collect_rarely()
        try:
            sender.send(("result", function(lambda line: sender.send(("line", line)))))
        except BuildError as error:
            sender.send(("refused", str(error)))
        except BaseException as error:  # sent to the parent, whatever it is
            lines = [line for line in str(error).splitlines() if line.strip()] or [""]
            full = "No space left" in str(error)
            sender.send(("failed", "no space left on the device" if full else f"{type(error).__name__}: {lines[0]}"))

    def join(self, progress: OnProgress = silent) -> Any:
        """Wait, and pass on what the function reports -> what it returned. Raises BuildError with what it raised."""
        kind, value = "line", None
        while kind == "line":
            try:
                kind, value = self.told.recv()
            except EOFError:
                kind, value = "failed", "the compiling process died; is there enough memory?"
            if kind == "line":
                progress(value)
        self.process.join()
        if kind == "refused":
            raise BuildError(value)
        if kind == "failed":
            raise BuildError(f"compile: {self.name}: {value}")
        return value


def run_at_once(functions: Mapping[str, Callable[[OnProgress], Any]]) -> None:
    """Run functions by name in processes of their own, in their order, one for each core at a time. Raises BuildError
    with what the first that fails raised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running = list(functions.items()), dict[Any, Forked]()
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                child = Forked(*waiting.pop(0))
                running[child.told] = child
            for told in wait(running):
                running[told].join()
                del running[told]
    finally:
        for child in running.values():
            child.process.terminate()


def run_forked(name: str, function: Callable[[OnProgress], Any], progress: OnProgress) -> Any:
    """Run a function in a process of its own and wait -> what it returned. Raises BuildError."""
    child = Forked(name, function)
    try:
        return child.join(progress)
    finally:
        child.process.terminate()


def _collect_rarely() -> None:
    """For the rest of a process that only compiles: leave what was there before to itself, and look for garbage
    rarely."""
    gc.freeze()
    gc.set_threshold(OBJECTS)

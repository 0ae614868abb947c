"""Each engine in a process of its own, which loads once and answers prompt after prompt."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .engines import Answer, Contender, Settings
from .families import family

SECONDS = 900  # longest that a load or an answer may take
SET_PARENT_DEATH_SIGNAL = 1


class WorkerFailed(Exception):
    """An engine that did not load or answer: one line, its reason last."""


class Worker:
    """The near end of an engine's process."""

    def __init__(self, contender: Contender, path: Path, settings: Settings):
        self.contender = contender
        self._log = settings.folder / "logs" / f"{contender.name.replace(' ', '-')}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")  # a fork would share libraries that count their threads
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, contender, path, settings, self._log)
        self._process = context.Process(target=_serve, args=arguments, daemon=False)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except WorkerFailed:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that answers, whose children may help."""
        return self._process.pid or 0

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """See `Runner.answer`. Raises WorkerFailed."""
        return Answer(*self._call("answer", prompt, new_tokens))

    def answer_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """See `BatchRunner.answer_all`. Raises WorkerFailed."""
        result: list[list[int]] = self._call("answer_all", prompts, new_tokens)
        return result

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):  # it may be gone
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _call(self, *request: Any) -> Any:
        with contextlib.suppress(OSError):  # its process has ended: reading says how
            self._pipe.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            done, result = self._pipe.recv() if self._pipe.poll(SECONDS) else (False, f"nothing in {SECONDS} s")
        except (EOFError, OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            done, result = False, f"its process ended: {lines[-1] if lines else 'without a word'}"
        if not done:
            raise WorkerFailed(f"{self.contender.name}: {result}; its output: {self._log}")
        return result


def _serve(pipe: Connection, contender: Contender, path: Path, settings: Settings, log: Path) -> None:
    """The far end: answers until it is sent None or the pipe closes. What libraries print goes to the log."""
    end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    runner = None
    try:
        runner = family(contender.family).Runner(contender, path, settings)
        pipe.send((True, None))
        while (request := pipe.recv()) is not None:
            method, *arguments = request
            result = getattr(runner, method)(*arguments)
            pipe.send((True, tuple(result) if isinstance(result, Answer) else result))
    except EOFError:  # nobody asks any more
        pass
    except Exception as error:  # a peer raises anything
        pipe.send((False, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"))
    finally:
        if runner is not None:
            runner.close()


def end_with_parent() -> None:
    """End this process when the one that started it dies, however: it must not answer on, unseen, beside what is timed
    next."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)

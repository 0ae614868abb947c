"""Loads an engine directory."""

from pathlib import Path

from ..progress import OnProgress, silent
from .engine import Engine
from .gpu import gpu_number
from .ladder.ladder import make_ladder
from .open_directory import open_directory


def load(
    directory: str | Path,
    deep_check: bool = False,
    *,
    prefix_cache_bytes: int = 0,
    prefill_per_step: int | None = None,
    learning: bool = True,
    learned: str | Path | None = None,
    nodes: int | str = "auto",
    device: str | None = None,
    kv_events: bool = False,
    progress: OnProgress = silent,
) -> Engine:
    """Load an engine directory.

    Args:
        directory: what `build` wrote.
        deep_check: hash the weights file too.
        prefix_cache_bytes: memory for keys and values of what was served: a prompt that begins like an earlier one, or
            goes on from its answer, prefills the rest alone. 0 keeps nothing.
        prefill_per_step: most prompt tokens, 2 at least, that are prefilled between two steps while others decode: the
            longest pause that a prompt makes in their streams. None means the engine's `prefill_chunk`.
        learning: whether an n-gram drafter counts what the engine writes, and drafts better with use. No text depends
            on it, but how fast one comes tells of others; so does a file that was learned before.
        learned: file of what was learned. The engine starts from it where it is there, and `close` writes it, unless
            the engine does not learn.
        nodes: how many drafted tokens a step verifies: a number, "all", or "auto", which chooses before each step what
            gives the most tokens per second here. The text does not depend on it. For that choice, the first load of an
            engine on a machine takes some seconds to time steps; the times are kept in the user's cache.
        device: which GPU an engine for GPUs runs on, as "cuda:1"; the current one of the calling thread by default.
        kv_events: have `Engine.kv_events` tell which blocks of tokens the prefix cache keeps, for a router.
        progress: called with a line when steps are timed, and with what an engine takes of a GPU's memory before it
            does.

    Returns:
        The engine, ready to generate.

    Raises:
        InputError: a number is unusable.
        EngineError: anything that could stop the engine from running here: what was expected, what was found, and what
            to do.
    """
    opened = open_directory(Path(directory), deep_check, gpu_number(device), progress)
    ladder = make_ladder(opened.session, nodes, opened.identity, progress)
    return Engine(
        opened.session,
        opened.text,
        opened.recommended,
        opened.tools,
        prefix_cache_bytes=prefix_cache_bytes,
        prefill_per_step=prefill_per_step,
        learning=learning,
        learned=learned,
        ladder=ladder,
        kv_events=kv_events,
    )

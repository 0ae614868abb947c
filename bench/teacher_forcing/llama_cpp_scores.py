"""llama.cpp's weights, through its Python bindings. Runs in a process of its own."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from side_by_side.engines import Skip

from .ours import Measured
from .scores import Scores, joined, score

PACKAGE = "llama-cpp-python"
INSTALL = f"pip install {PACKAGE}"


def llama_cpp_version() -> dict[str, str]:
    """The bindings' version by their name; empty where they are not installed."""
    return {PACKAGE: version(PACKAGE)} if find_spec("llama_cpp") else {}


def check_installed() -> None:
    """Raises Skip."""
    if not llama_cpp_version():
        raise Skip(f"{PACKAGE} is not installed: {INSTALL}")


def measure_file(file: Path, sequences: Sequence[list[int]], threads: int, **options: Any) -> Measured:
    """Score every sequence with the weights of a GGUF file. options: further ones of `llama_cpp.Llama`.

    The process ends with the file's weights: the bindings have their own OpenMP, and may crash while Python shuts down.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        scores = pool.submit(_score, str(file), sequences, threads, options).result()
    return Measured(scores, sum(int(tensor.n_bytes) for tensor in GGUFReader(file).tensors))


def _score(file: str, sequences: Sequence[list[int]], threads: int, options: dict[str, Any]) -> Scores:
    import llama_cpp
    import torch

    slots = max(map(len, sequences))
    sizes = {"n_ctx": slots, "n_batch": slots, "n_ubatch": slots, "n_threads": threads, "n_threads_batch": threads}
    model = llama_cpp.Llama(file, logits_all=True, verbose=False, **sizes, **options)
    parts = []
    for ids in sequences:
        model.reset()
        model.eval(ids)
        parts.append(score(torch.from_numpy(model.scores[: len(ids)]), ids))
    model.close()
    return joined(parts)

"""llama.cpp's weights, through its own server: it is asked for the next token of each part of a text in turn."""

from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch
from gguf import GGUFReader
from side_by_side.engines import AS_IT_IS, Contender, Settings, Skip
from side_by_side.peer_llama_cpp import Runner, binary, version
from specstep.progress import OnProgress

from .ours import Measured
from .scores import Scores, joined

LIKELIEST = 1000  # tokens that it is asked for; for all of them where the text's own is not among these


def llama_cpp_version() -> dict[str, str]:
    """Its build by its name; empty where it is not installed."""
    try:
        return {"llama.cpp": version()}
    except Skip:
        return {}


def check_installed() -> None:
    """Raises Skip."""
    binary()


def measure_file(
    file: Path, sequences: Sequence[list[int]], threads: int, progress: OnProgress, **options: Any
) -> Measured:
    """Score every sequence with the weights of a GGUF file. options: further ones of its server."""
    tensors = GGUFReader(file).tensors
    vocabulary = next(int(tensor.shape[1]) for tensor in tensors if tensor.name == "token_embd.weight")
    settings = Settings(str(file), threads, max(map(len, sequences)) + 1, 1, (), file.parent)
    server = Runner(Contender("llama.cpp", AS_IT_IS, "none", options), file, settings, DEVNULL)
    parts = []
    try:
        for number, ids in enumerate(sequences):
            progress(f"llama.cpp: sequence {number + 1} of {len(sequences)}")
            parts.append(_score(server, ids, vocabulary))
    finally:
        server.close()
    return Measured(joined(parts), sum(int(tensor.n_bytes) for tensor in tensors))


def _score(server: Runner, ids: list[int], vocabulary: int) -> Scores:
    losses, greedy = [], []
    for at in range(1, len(ids)):
        likely = server.log_probs(ids[:at], LIKELIEST)
        if ids[at] not in likely:
            likely = server.log_probs(ids[:at], vocabulary)
        losses.append(-likely[ids[at]])
        greedy.append(max(likely, key=likely.__getitem__))
    return Scores(torch.tensor(losses, dtype=torch.float64), torch.tensor(greedy))

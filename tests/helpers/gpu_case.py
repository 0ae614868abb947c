"""What is asked of an engine on a GPU, in one place: so that a CPU's engines are asked it, too."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import specstep
import torch
from models import greedy, tiny_model
from specstep.runtime.cuda_graphs import CudaGraphs
from specstep.runtime.engine_file import MANIFEST
from transformers import PreTrainedModel

ENGINES = os.environ.get("SPECSTEP_GPU_ENGINES")  # folder of engines that are built ahead, on any machine
BUILD_FOR = os.environ.get("SPECSTEP_BUILD_FOR")  # compute capability that they are built for now, without being run
NEW_TOKENS = 40
SIZES = {"max_batch": 8, "max_seq_len": 192, "prefill_chunk": 16}
PROMPTS = [  # of one token, of several chunks, with repeats
    [5],
    [40, 41, 42] * 9,
    [*range(30, 83)],
    [9, 9, 9, 9],
    [7, 8],
    [*range(200, 284)],
    [60, 61, 62, 63, 64] * 4 + [60, 61],
    [*range(100, 117)],
]
HEAD, TARGET, DRAFTER = "{head}", "{target}", "{drafter}"
CHOICES: dict[str, dict[str, Any]] = {  # drafter "{target}": one that is always right
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "model chain": {"drafter": DRAFTER, "nodes": 3},
    "right dynamic": {"drafter": TARGET, "tree": "dynamic", "nodes": 7, "depth": 3, "top_k": 2},
    "head chain": {"drafter": HEAD, "tree": "chain", "nodes": 4},
    "head static": {"drafter": HEAD, "tree": "static", "nodes": 9, "depth": 3, "top_k": 3},
    "head dynamic": {"drafter": HEAD, "tree": "dynamic", "nodes": 11, "depth": 4, "top_k": 3},
    "mixed dynamic": {"drafter": f"ngram,{HEAD}", "tree": "dynamic", "nodes": 8, "depth": 4, "top_k": 3},
}


def options_of(choice: str, head: Path, target: Path, drafter: Path | str = "") -> dict[str, Any]:
    """Build options of a choice."""
    chosen = CHOICES[choice]
    return chosen | {"drafter": chosen["drafter"].format(head=head, target=target, drafter=drafter)}


def engine_of(name: str, model: Path, folder: Path, **options: Any) -> Path:
    """An engine for a GPU, built in `folder`; or the one of that name among those that are built ahead. Where it is
    only to be built, the test ends as skipped."""
    options = {"device": "cuda"} | SIZES | options
    kept = folder if ENGINES is None else Path(ENGINES) / name.replace(" ", "-")
    if not (kept / MANIFEST).is_file():
        capability = {"compute_capability": (BUILD_FOR,)} if BUILD_FOR else {}
        specstep.build(str(model), kept, **options, **capability)
    if BUILD_FOR:
        pytest.skip(f"built for compute capability {BUILD_FOR}, to be run there")
    return kept


def expected_answers(architecture: str) -> list[list[int]]:
    """What transformers says on a CPU in float32."""
    model = tiny_model(architecture)
    return [greedy(model, prompt, NEW_TOKENS, [1]) for prompt in PROMPTS]


def answers(engine: Any, at_once: int) -> list[list[int]]:
    """Token ids of all prompts, so many of them at a time."""
    groups = [PROMPTS[start : start + at_once] for start in range(0, len(PROMPTS), at_once)]
    return [result.token_ids for group in groups for result in engine.generate(group, NEW_TOKENS)]


class Calls:
    """How often the session of an engine stepped, and a CUDA graph was replayed."""

    def __init__(self) -> None:
        self.steps = self.replays = 0


@contextlib.contextmanager
def counted(session: Any) -> Iterator[Calls]:
    """Count while the block runs."""
    calls, graph = Calls(), torch.cuda.CUDAGraph
    begin, replay = session.begin_step, graph.replay

    def counted_begin(*arguments: Any) -> Any:
        calls.steps += 1
        return begin(*arguments)

    def counted_replay(recorded: Any) -> Any:
        calls.replays += 1
        return replay(recorded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "begin_step", counted_begin)
        patch.setattr(graph, "replay", counted_replay)
        yield calls


def check_engine(folder: Path, expected: list[list[int]], batches: Sequence[int] = (1, 4, 8)) -> dict[str, int]:
    """An engine says what is expected, so many prompts at a time, in steps that are called plainly and in steps that
    replay a CUDA graph -> how many steps did, and how many drafts were accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphs, "of", lambda graphs, run: run)
        with specstep.load(folder, nodes="all", learning=False) as engine, counted(engine.session) as plain:
            assert answers(engine, batches[-1]) == expected, "plain calls"
            assert plain.steps > 0 and plain.replays == 0
    return check_replays(folder, expected, batches)


def check_replays(folder: Path, expected: list[list[int]], batches: Sequence[int] = (1, 4, 8)) -> dict[str, int]:
    """The same without the steps that are called plainly: all ranks of an engine replay graphs, or none."""
    with specstep.load(folder, nodes="all", learning=False) as engine:
        for at_once in batches:
            assert answers(engine, at_once) == expected, f"{at_once} at a time: first calls of each size"
        with counted(engine.session) as calls:
            for at_once in batches:
                assert answers(engine, at_once) == expected, f"{at_once} at a time: replays"
        assert calls.steps > 0 and calls.replays == (calls.steps if engine.spec.device == "cuda" else 0)
        told = [result.stats["accepted"] for result in engine.generate(PROMPTS, NEW_TOKENS)]
    accepted = sum(int(depth) * steps for counts in told for depth, steps in counts.items())
    return {"replays": calls.replays, "accepted": accepted}


@torch.no_grad()
def flips(model: PreTrainedModel, plain: list[list[int]], drafted: list[list[int]]) -> list[dict[str, Any]]:
    """Where answers first part: the prompt, the place, and the gap between the two tokens' logits in float32, in
    standard deviations of the logits there. An answer that ends earlier parts where the other goes on."""
    found = []
    for index, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        place = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            assert len(one) == len(other), f"prompt {index}: one answer goes on where the other ended"
            continue
        logits = model(torch.tensor([PROMPTS[index] + one[:place]])).logits[0, -1]
        gap = (logits[one[place]] - logits[other[place]]).abs() / logits.std()
        found.append({"prompt": index, "place": place, "gap": round(float(gap), 4)})
    return found

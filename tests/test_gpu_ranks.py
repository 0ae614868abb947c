"""On several NVIDIA GPUs: engines whose ranks have one each say what transformers says. Run by `make gpu-check`."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import specstep
import torch
from gpu_case import BUILD_FOR, answers, check_replays, engine_of, expected_answers, options_of
from models import save_eagle3, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2 and not BUILD_FOR, reason="needs two NVIDIA GPUs"),
]
SHARED = {  # architecture, choice of `CHOICES`, and options: what ranks share in other ways
    "none": ("Llama", "none", {}),
    "ngram": ("Llama", "ngram", {}),
    "head dynamic": ("Llama", "head dynamic", {}),
    "draft model": ("Llama", "model chain", {}),
    "shared draft model": ("Llama", "model chain", {"draft_ranks": 2}),
    "experts": ("Qwen3Moe", "ngram", {}),
    "fused projections": ("Phi3", "ngram", {}),
    "windows": ("Gemma3Text", "ngram", {}),
}


@pytest.fixture
def shared(tmp_path, drafter_folder):
    """`shared(name)`: an engine of two ranks."""

    def build(name):
        architecture, choice, options = SHARED[name]
        model = save_model(tmp_path / "model", architecture)
        options = options_of(choice, save_eagle3(tmp_path / "head"), model, drafter_folder) | options
        return engine_of(f"ranks {name}", model, tmp_path / "engine", ranks=2, **{"dtype": "float32"} | options)

    return build


@pytest.mark.parametrize("name", SHARED)
def test_ranks_equal_transformers(name, shared, record_property):
    """First calls, and replays of CUDA graphs, in which NCCL gathers."""
    record_property("told", check_replays(shared(name), expected_answers(SHARED[name][0])))


def test_a_killed_rank_ends_the_engine_with_one_line(shared):
    """In the middle of a text: the first rank's GPU waits for it then, and is freed."""
    with specstep.load(shared("ngram"), nodes="all") as engine:
        answers(engine, 8)
        (other,) = engine.session.others
        steps = engine.submit(engine.request([5, 6, 7], 150, ignore_eos=True))
        next(iter(steps))
        os.kill(other.process, signal.SIGKILL)
        with pytest.raises(specstep.EngineError) as told:
            for _ in range(100):
                answers(engine, 8)
        assert f"rank 1 (process {other.process}), which was killed by signal 9" in str(told.value)
        assert engine.broken is not None
    assert not Path(f"/proc/{other.process}").exists()


def test_two_engines_at_once_do_not_meet(shared):
    folder = shared("ngram")
    with (
        specstep.load(folder, nodes="all") as one,
        specstep.load(folder, nodes="all") as two,
        ThreadPoolExecutor() as pool,
    ):
        first, second = pool.map(lambda engine: answers(engine, 8), (one, two))
    assert first == second == expected_answers("Llama")


def test_more_ranks_than_gpus_are_refused(shared):
    with pytest.raises(specstep.InputError, match="device: expected 2 GPUs from cuda:"):
        specstep.load(shared("ngram"), device=f"cuda:{torch.cuda.device_count() - 1}")

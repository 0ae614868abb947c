"""Before anything is compiled: are the drafts any good? A drafter that fits in shape may still never be right."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from ..graphs.step import SpeculativeStep
from ..progress import OnProgress
from ..report import RUNNING
from ..runtime.engine_file import EngineSpec, TensorSpec
from ..runtime.inductor.torch_session import TorchSession
from ..runtime.manifest_rules import capacity_for
from .assemble import Assembled
from .source import Source

QUESTION = "Explain in a few sentences why the sky is blue, then list three facts about light."
FEW, STEPS, SECONDS = 8, 24, 10.0  # where some are accepted, where none is, and how long that may take


def try_drafts(source: Source, graphs: Assembled, device: str, progress: OnProgress) -> None:
    """Continue a short text with the plain modules, which lie on `device`, and report the tokens per step of a neural
    drafter in one line. A second line warns where none of its drafts is accepted. N-grams are not tried: they learn,
    and copy from longer texts."""
    step = graphs.step.module
    assert isinstance(step, SpeculativeStep)
    if step.drafter.nodes == 0 or not step.drafter.scorer.neural:
        return
    steps = _accepted_drafts(source, graphs, device)
    accepted = list(islice(steps, FEW))
    if not any(accepted):
        accepted += steps
    progress(f"drafts: {tokens_per_step(accepted):.1f} tokens per step over {len(accepted)} steps")
    if not any(accepted):
        progress(
            "warning: no draft was accepted. Usual causes: a head that was trained for another target, feature layers "
            "that are one off (eagle_aux_hidden_state_layer_ids), another tokenizer than the target's"
        )


def accepted_drafts(source: Source, graphs: Assembled, device: str) -> list[int]:
    """What is accepted of the drafts of a short text, step after step."""
    return list(_accepted_drafts(source, graphs, device))


def _accepted_drafts(source: Source, graphs: Assembled, device: str) -> Iterator[int]:
    prompt = _prompt(source.tokenizer, graphs.spec)
    longest = min(graphs.spec.max_seq_len, len(prompt) + STEPS * (1 + graphs.spec.config["depth"]))
    return _accepted(prompt, graphs, _trial_spec(graphs.spec, longest, device))


def tokens_per_step(accepted: Sequence[int]) -> float:
    """Of steps of which that much is accepted."""
    return 1 + sum(accepted) / len(accepted)


@torch.no_grad()
def _accepted(prompt: list[int], graphs: Assembled, spec: EngineSpec) -> Iterator[int]:
    """The number of drafted tokens that the target agreed with, step after step."""
    count = 0
    deadline = time.monotonic() + SECONDS
    session = TorchSession(spec, lambda inputs: graphs.prefill(*inputs), lambda inputs: graphs.step(*inputs))
    row = session.admit(prompt, spec.max_seq_len, [])
    finish = session.step()[row].finish  # nothing is drafted for a row's first step
    while finish == RUNNING and count < STEPS and (not count or time.monotonic() < deadline):
        told = session.step()[row]
        count, finish = count + 1, told.finish
        yield len(told.path)


def _prompt(tokenizer: Any, spec: EngineSpec) -> list[int]:
    """Token ids, two at least, that leave a row room."""
    ids = _question(tokenizer) if tokenizer else []
    return list(ids or range(min(16, spec.vocab_size)))[: spec.max_seq_len // 2]


def _question(tokenizer: Any) -> Sequence[int]:
    """A chat model is asked in its own template, as its drafter was; in plain text where the template refuses."""
    ids: Sequence[int] = []
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": QUESTION}]
        with contextlib.suppress(Exception):  # templates raise anything
            ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    return ids or tokenizer(QUESTION)["input_ids"]


def _trial_spec(spec: EngineSpec, longest: int, device: str) -> EngineSpec:
    """The same engine on a device, with a batch of one and room for `longest` tokens alone: caches of all its slots can
    take more memory than the model."""
    capacity = capacity_for(longest, spec.scratch, spec.slot_step)

    def shaped(tensor: TensorSpec, *row: int) -> TensorSpec:
        return dataclasses.replace(tensor, shape=(1, *row))

    state = (shaped(t, *((capacity,) if t.name in ("history", "prediction") else t.shape[1:])) for t in spec.state)
    caches = (shaped(t, t.shape[1], capacity, t.shape[3]) for t in spec.caches)
    return dataclasses.replace(
        spec,
        device=device,
        max_batch=1,
        max_seq_len=longest,
        capacity=capacity,
        state=tuple(state),
        caches=tuple(caches),
    )

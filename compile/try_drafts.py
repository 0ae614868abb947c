"""Before anything is compiled: are the drafts any good? A drafter that fits in shape may still never be right."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from ..graphs.step import SpeculativeStep
from ..report import RUNNING
from ..runtime.engine_file import EngineSpec, TensorSpec
from ..runtime.inductor.torch_session import TorchSession
from .assemble import Graphs
from .source import Source

QUESTION = "Explain in a few sentences why the sky is blue, then list three facts about light."
STEPS, SECONDS = 24, 10.0  # at most


def try_drafts(source: Source, graphs: Graphs, report: Callable[[str], None]) -> None:
    """Continue a short text with the plain modules, and report the tokens per step in one line. A second line warns of
    a neural drafter none of whose drafts is accepted."""
    step = graphs.step.module
    assert isinstance(step, SpeculativeStep)
    if step.drafter.nodes == 0:
        return
    accepted = _accepted(_prompt(source, graphs.spec), graphs)
    report(f"drafts: {1 + sum(accepted) / len(accepted):.1f} tokens per step over {len(accepted)} steps")
    if step.drafter.scorer.neural and not any(accepted):
        report(
            "warning: no draft was accepted. Usual causes: a head that was trained for another target, feature layers "
            "that are one off (eagle_aux_hidden_state_layer_ids), another tokenizer than the target's"
        )


def _accepted(prompt: list[int], graphs: Graphs) -> list[int]:
    """The number of drafted tokens that the target agreed with, step after step."""
    accepted: list[int] = []
    deadline = time.monotonic() + SECONDS
    with torch.no_grad():
        session = TorchSession(
            _one_row(graphs.spec), lambda inputs: graphs.prefill(*inputs), lambda inputs: graphs.step(*inputs)
        )
        row = session.admit(prompt, graphs.spec.max_seq_len, [])
        finish = RUNNING
        while finish == RUNNING and len(accepted) < STEPS and (not accepted or time.monotonic() < deadline):
            told = session.step()[row]
            accepted.append(len(told.path))
            finish = told.finish
    return accepted


def _prompt(source: Source, spec: EngineSpec) -> list[int]:
    """Token ids, at least one, that leave a row room. A chat model is asked in its own template, as its drafter was."""
    ids: Sequence[int] = range(min(16, spec.vocab_size))
    if source.tokenizer and source.tokenizer.chat_template:
        asked = [{"role": "user", "content": QUESTION}]
        ids = source.tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    elif source.tokenizer:
        ids = source.tokenizer(QUESTION)["input_ids"]
    return list(ids)[: spec.max_seq_len // 2]


def _one_row(spec: EngineSpec) -> EngineSpec:
    """The same engine with a batch of one."""

    def first(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(dataclasses.replace(tensor, shape=(1, *tensor.shape[1:])) for tensor in tensors)

    return dataclasses.replace(spec, max_batch=1, state=first(spec.state), caches=first(spec.caches))

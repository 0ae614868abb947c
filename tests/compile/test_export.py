"""The rules of a graph: what would read data back to the host, or write what a session does not expect, is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specstep.compile.assemble import FlatProgram
from specstep.compile.export import export_program
from specstep.runtime.engine_file import EngineSpec, ProgramSpec, TensorSpec
from torch import Tensor, nn

NAMES = ("lengths", "history", "keys.0", "values.0")
SPEC = EngineSpec(
    config={}, max_batch=2, max_seq_len=128, capacity=256, slot_step=64, scratch=8, prefill_chunk=16, vocab_size=32,
    stop_ids=(), device="cpu",
    state=(TensorSpec("lengths", (2,), "int64"), TensorSpec("history", (2, 256), "int64")),
    caches=(TensorSpec("keys.0", (2, 1, 256, 4), "float32"), TensorSpec("values.0", (2, 1, 256, 4), "float32")),
    prefill=ProgramSpec("", NAMES, ("lengths",)), step=ProgramSpec("", NAMES, ("lengths",)),
)  # fmt: skip


class Step(nn.Module):
    """Writes its cache and its history, as a step may; `more` is what it does besides, to the lengths and the keys."""

    def __init__(self, more: Callable[[Tensor, Tensor], Any]):
        super().__init__()
        self.more = more

    def forward(self, state: dict[str, Tensor], keys: tuple[Tensor], values: tuple[Tensor]) -> dict[str, Tensor]:
        state["history"][:, 0] = 1
        keys[0][:, :, 0] = 1.0
        values[0][:, :, 0] = 1.0
        extra = self.more(state["lengths"], keys[0])
        return {"lengths": state["lengths"] + (0 if extra is None else extra)}


def export(more: Callable[[Tensor, Tensor], Any]) -> Any:
    return export_program(FlatProgram(Step(more), (), NAMES[:2], NAMES[2:], ("lengths",)), SPEC)


def test_a_step_that_keeps_the_rules_is_exported_with_any_rows_and_slots() -> None:
    exported = export(lambda lengths, keys: keys.sum((1, 2, 3)).long())
    for rows, slots in ((1, 64), (2, 128)):
        caches = [torch.ones(rows, 1, slots, 4) for _ in range(2)]
        history = torch.zeros(rows, 256, dtype=torch.int64)
        (lengths,) = exported.module()(torch.zeros(rows, dtype=torch.int64), history, *caches)
        assert lengths.tolist() == [slots * 4] * rows and history[:, 0].tolist() == [1] * rows


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (lambda lengths, keys: lengths[0].item(), "aten.item"),
        (lambda lengths, keys: lengths.nonzero().sum(), "aten.nonzero"),
        (lambda lengths, keys: lengths.unique().sum(), "aten._unique2"),
        (lambda lengths, keys: lengths.masked_select(lengths > 0).sum(), "aten.masked_select"),
        (lambda lengths, keys: lengths[lengths > 0].sum(), "aten.index.Tensor"),
        (lambda lengths, keys: torch._assert_async((lengths > 0).all()), "aten._assert_async"),
    ],
    ids=["item", "nonzero", "unique", "masked_select", "index by mask", "assert"],
)
def test_what_depends_on_data_is_refused(more: Callable[[Tensor, Tensor], Any], named: str) -> None:
    """With the line that it comes from."""
    with pytest.raises(
        AssertionError, match=rf"(?s){named}\S* in the graph, which depends on data, from:.*test_export\.py"
    ):
        export(more)


@pytest.mark.parametrize(
    "more",
    [lambda lengths, keys: lengths.add_(1), lambda lengths, keys: lengths[:1].fill_(0).sum()],
    ids=["directly", "through a view"],
)
def test_a_write_to_what_is_no_cache_is_refused(more: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(
        AssertionError, match=r"written in place: expected \[.*'keys\.0'.*\] at most, got \['lengths'\]"
    ):
        export(more)

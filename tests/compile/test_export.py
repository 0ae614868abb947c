"""The rules of a graph: what would read data back to the host, or write what a session does not expect, is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import specstep
import torch
from models import tiny_model
from specstep.compile.assemble import FlatProgram, assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.source import Source
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.state import StateTensor
from specstep.graphs.tree import TreeShape
from specstep.runtime.engine_file import EngineSpec, ProgramSpec, TensorSpec
from torch import Tensor, nn

NAMES = ("lengths", "history", "keys.0", "values.0")
SPEC = EngineSpec(
    config={"nodes": 0}, max_batch=2, max_seq_len=128, capacity=256, slot_step=64, scratch=8, catch_up=0,
    drafter_tensors=(), recurrent=(), prefill_chunk=16,
    vocab_size=32, stop_ids=(), device="cpu",
    state=(TensorSpec("lengths", (2,), "int64"), TensorSpec("history", (2, 256), "int64")),
    shared=(),
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
    return export_program(FlatProgram(Step(more), (), NAMES[:2], (), NAMES[2:], ("lengths",), ("history",)), SPEC)


def test_a_step_that_keeps_the_rules_is_exported_with_any_rows_and_slots() -> None:
    exported = export(lambda lengths, keys: keys.sum((1, 2, 3)).long())
    for rows, slots in ((1, 64), (2, 128)):
        caches = [torch.ones(rows, 1, slots, 4) for _ in range(2)]
        history = torch.zeros(rows, 256, dtype=torch.int64)
        (lengths,) = exported.module()(torch.zeros(rows, dtype=torch.int64), history, *caches)
        assert lengths.tolist() == [slots * 4] * rows and history[:, 0].tolist() == [1] * rows


def test_what_was_flattened_takes_its_shape_again_at_any_size() -> None:
    """As a mixture's shared expert does, whose layer views the tokens of all rows as one list."""

    def flattened(lengths: Tensor, keys: Tensor) -> Tensor:
        tokens = keys[:, 0].transpose(0, 1).contiguous()  # [slots, rows, 4]
        return (tokens.view(-1, 4).view(tokens.shape) * 2).sum((0, 2)).long()

    exported = export(flattened)
    caches = [torch.ones(2, 1, 128, 4) for _ in range(2)]
    history = torch.zeros(2, 256, dtype=torch.int64)
    (lengths,) = exported.module()(torch.zeros(2, dtype=torch.int64), history, *caches)
    assert lengths.tolist() == [1024, 1024]


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
    [
        lambda lengths, keys: lengths.add_(1),
        lambda lengths, keys: lengths[:1].fill_(0).sum(),
        lambda lengths, keys: torch.add(lengths, 1, out=lengths),
        lambda lengths, keys: torch.add(lengths[:1], 1, out=lengths[:1]).sum(),
    ],
    ids=["directly", "through a view", "by name", "by name through a view"],
)
def test_a_write_to_what_is_no_cache_is_refused(more: Callable[[Tensor, Tensor], Any]) -> None:
    with pytest.raises(
        AssertionError, match=r"written in place: expected \[.*'keys\.0'.*\] at most, got \['lengths'\]"
    ):
        export(more)


def test_what_is_written_by_name_to_a_fresh_tensor_is_no_input() -> None:
    export(lambda lengths, keys: torch.add(lengths, 1, out=torch.zeros_like(lengths)).mul_(0))


class Branching(Ngram):
    """A third party's scorer whose state depends on a size by an `if` of Python."""

    def __init__(self, more: Callable[[int, int], int]):
        super().__init__()
        self.more = more

    def state(self, shape: TreeShape) -> dict[str, StateTensor]:
        return super().state(shape) | {"marks": StateTensor((), torch.int64)}

    def prefill(self, tokens: Tensor, count: Tensor, *rest: Any) -> dict[str, Tensor]:
        return super().prefill(tokens, count, *rest) | {"marks": torch.zeros_like(count)}

    def begin(self, state: dict[str, Tensor], keys: Any, values: Any, shape: TreeShape) -> Any:
        children, expand, own = super().begin(state, keys, values, shape)
        rows, slots = state["history"].shape  # cut to the slots in use
        return children, expand, own | {"marks": state["marks"] + self.more(rows, slots)}


@pytest.mark.parametrize(
    ("more", "max_batch", "refused"),
    [
        (lambda rows, slots: 0, 2, ()),
        (lambda rows, slots: 0 if rows > 1 else 100, 2, ("step",)),
        (lambda rows, slots: 100 if slots == 64 else 0, 1, ("step",)),
    ],
    ids=["no branch", "rows", "slots"],
)
def test_a_branch_on_a_size_of_a_third_partys_scorer_is_refused(
    more: Callable[[int, int], int], max_batch: int, refused: tuple[str, ...]
) -> None:
    options = {"drafter": "ngram", "dtype": "float32", "max_batch": max_batch, "max_seq_len": 300, "nodes": 1}
    model = tiny_model("Llama", num_hidden_layers=1)
    graphs = assemble(Source("Llama", model, None), make_config(options), Branching(more))
    for name in ("prefill", "step"):  # a prefill drafts nothing
        if name not in refused:
            export_program(getattr(graphs, name), graphs.spec)
            continue
        with pytest.raises(specstep.BuildError, match=r"^drafter: an `if`.*; expected code .*any number of rows"):
            export_program(getattr(graphs, name), graphs.spec)

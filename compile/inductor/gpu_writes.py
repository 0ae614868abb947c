"""How Inductor lowers `specstep::kv_write`: stores into the caches where they lie, fused with what computes keys and
values, such as rotary embedding. A kernel of ours would be one launch more."""

from collections.abc import Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V, ops

from ...kernels.kv_write.op import kv_write

Index = Sequence[Any]  # an expression for each dimension


def lower_writes() -> None:
    """Register how `specstep::kv_write` is lowered."""
    lowerings[kv_write._opoverload] = _write


def _write(keys: Any, values: Any, new_keys: Any, new_values: Any, lengths: Any, first: Any) -> None:
    """See `kernels/kv_write/reference.py`; tensors come as Inductor's boxes."""
    for cache, new in ((keys, new_keys), (values, new_values)):
        _store(cache, new, lengths.make_loader(), first)


def _store(cache: Any, new: Any, length: Any, first: Any) -> None:
    """Store new [B, H, T, D] into a cache [B, H, S, D] from slot `length` + first on, which is a load of one of [B].
    Tokens come before heads, as products leave them: what is read in another order gets a launch of its own."""
    cache.realize()
    slots, load = cache.get_size()[2], new.make_loader()
    rows, heads, tokens, columns = new.get_size()

    def value(index: Index) -> Any:
        row, token, head, column = index
        return load([row, head, token, column])

    def place(index: Index) -> Index:
        row, token, head, column = index
        behind = ops.indirect_indexing(length([row]), slots, check=False, wrap_neg=False)
        return [row, head, behind + first + token, column]

    scatter = ir.Scatter(
        device=cache.get_device(),
        dtype=cache.get_dtype(),
        inner_fn=value,
        ranges=[rows, tokens, heads, columns],
        output_indexer=place,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(cache), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)

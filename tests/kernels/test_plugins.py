"""TensorRT plugins: their shapes, scalars and grids launch the kernels so that they equal the references."""

from typing import Any

import pytest
import torch
from specstep.kernels import plugins
from specstep.kernels.accept.reference import accept
from specstep.kernels.cache_write.reference import cache_write
from specstep.kernels.choose.reference import choose
from specstep.kernels.compact.reference import compacted
from specstep.kernels.plugin import DYNAMIC, Plugin
from specstep.kernels.rank.reference import rank
from specstep.kernels.top_log_probs.reference import top_log_probs
from specstep.kernels.tree_attention.reference import tree_attention
from specstep.kernels.tree_layout.reference import tree_layout
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches kernels on CPU tensors")
PLUGINS = {plugin.name: plugin for plugin in plugins.PLUGINS}
BATCH, NODES = 5, 9


def launch(kernel: str, inputs: list[Tensor], dynamic: bool = False, **attributes: Any) -> list[Tensor]:
    """Run a plugin as TensorRT would: outputs are allocated or aliased, scalars and grid come from the shapes."""
    plugin: Plugin = PLUGINS[kernel]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in inputs]
    sizes = plugin.sized([tuple(tensor.shape) for tensor in inputs], attributes)
    outputs = []
    for index, (name, kind) in enumerate(plugin.outputs.items()):
        dtype = getattr(torch, plugin.dtype(dtypes) if kind == "float" else kind)
        aliased = index in plugin.aliases
        outputs.append(inputs[plugin.aliases[index]] if aliased else torch.full(sizes[name], 77, dtype=dtype))
    assert all(plugin.accepts(i, [*dtypes, *(str(t.dtype)[6:] for t in outputs)]) for i in range(len(inputs)))
    known = {key: tuple(DYNAMIC if dynamic and i == 0 else s for i, s in enumerate(x)) for key, x in sizes.items()}
    case = plugin.case(plugin.dtype(dtypes), known, attributes)
    visible = [name for name in case.kernel.arg_names if name not in case.constants]
    assert visible[: len(inputs)] == [*plugin.inputs] and visible[-len(outputs) :] == [*plugin.outputs]
    arguments = dict(zip(visible, [*inputs, *plugin.scalars(sizes), *outputs], strict=True))
    case.kernel[plugin.grid(sizes, case.constants)](**arguments, **case.constants)
    return outputs


def trees(random_trees: Any, batch: int = BATCH, nodes: int = NODES) -> tuple[Tensor, Tensor]:
    parents, valid = random_trees(batch, nodes, 3)
    return parents, valid


@pytest.mark.parametrize("nodes", [1, 9, 40])
def test_tree_layout(random_trees: Any, nodes: int) -> None:
    parents, valid = trees(random_trees, nodes=nodes)
    got = launch("tree_layout", [parents, valid])
    assert all(torch.equal(a, b) for a, b in zip(got, tree_layout(parents, valid), strict=True))


def test_accept(random_trees: Any) -> None:
    parents, valid = trees(random_trees)
    tokens, choice = torch.randint(0, 2, (2, BATCH, NODES), generator=torch.Generator().manual_seed(1))
    ancestors, depths = tree_layout(parents, valid)
    got = launch("accept", [tokens, parents, valid, ancestors, depths, choice], max_depth=4)
    want = accept(tokens, parents, valid, ancestors, depths, choice, 4)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compact(dtype: torch.dtype) -> None:
    cache = torch.randn(2, 3, 20, 12, generator=torch.Generator().manual_seed(2)).to(dtype)
    lengths, path = torch.tensor([4, 15]), torch.tensor([[0, 2, 5, 6], [0, 1, 4, 9]])
    accepted = torch.tensor([3, 2])
    want = compacted(cache, lengths, path, accepted)
    (got,) = launch("compact", [cache, lengths, path, accepted])
    assert got is cache and torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_cache_write(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    cache, rows = torch.randn(2, 3, 10, 12, generator=generator).to(dtype), torch.randn(2, 3, 4, 12).to(dtype)
    slots = torch.stack([torch.randperm(10, generator=generator)[:4] for _ in range(6)]).view(2, 3, 4)
    b, h = torch.arange(2)[:, None, None], torch.arange(3)[None, :, None]
    indices = torch.stack(torch.broadcast_tensors(b, h, slots), -1)
    want = cache_write(cache, indices, rows)
    (got,) = launch("cache_write", [cache, indices, rows])
    assert got is cache and torch.equal(got, want)
    indices[1, 2, 3] = torch.tensor([1, 2, 10])  # past the end: left out
    indices[0, 0, 0] = torch.tensor([-1, 0, 0])
    assert torch.equal(launch("cache_write", [cache, indices, rows])[0], want)


def test_choose(random_trees: Any) -> None:
    """A greedy row leaves its scratch alone; a sampled row with penalties works in its own."""
    generator, nodes, vocabulary = torch.Generator().manual_seed(6), 3, 50
    logits = torch.randn(2, nodes, vocabulary, generator=generator)
    ancestors, depths = tree_layout(*trees(random_trees, batch=2, nodes=nodes))
    tokens, history = (torch.randint(0, 6, (2, n), generator=generator) for n in (nodes, 10))
    sampling = torch.tensor([[0.0] * 7, [0.8, 20, 0.9, 0.01, 1.3, 0.5, 0.25]])
    ids, banned = torch.full((2, 4), -1), torch.full((2, nodes, 5), -1)
    rows = [torch.tensor([7, 4]), torch.tensor([3, 2]), sampling, torch.tensor([5, 2**40])]
    inputs = [logits, tokens, ancestors, depths, history, *rows, ids, ids * 0.0, banned]
    inputs += [torch.full((2, nodes, 2), -1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)]
    for dynamic in (False, True):
        got, scratch = launch("choose", inputs, dynamic=dynamic)
        assert torch.equal(got, choose(*inputs))
        assert (scratch[0] == 77).all() and (scratch[1, :, :vocabulary] != 77).all()


@pytest.mark.parametrize("top", [1, 20])
def test_top_log_probs(top: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits, ids = torch.randn(2, 4, 60, generator=generator), torch.randperm(100, generator=generator)[:60]
    rows = [torch.tensor([1, 0]), torch.tensor([0.7, 0.0]), torch.tensor([3, 4])]
    nodes, positions = torch.tensor([[0, 3, 1], [2, 2, 0]]), torch.tensor([[8, 9, 10], [4, 5, 6]])
    mask = [torch.randint(-(2**31), 2**31, (2, 4, 2), generator=generator, dtype=torch.int32), torch.tensor([1, 0])]
    inputs = [logits, nodes, *rows, positions, ids]
    got, want = launch("top_log_probs", [*inputs, *mask], dynamic=True, top=top), top_log_probs(*inputs, top, *mask)
    assert torch.equal(got[0], want[0])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got[1:], want[1:], strict=True))


def test_rank() -> None:
    generator = torch.Generator().manual_seed(8)
    tokens, log_q = torch.randint(0, 9, (2, 3, 7), generator=generator), torch.randn(2, 3, 7, generator=generator)
    rows = [torch.tensor([0.9, 0.0]), torch.tensor([3, 4]), torch.tensor([8, 9])]
    inputs = [tokens, log_q.log_softmax(-1), *rows]
    got, want = launch("rank", inputs, dynamic=True, top_k=4), rank(*inputs, 4)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1 / 4096)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("dynamic", "window", "softcap", "value_size"), [(False, 0, 0.0, 16), (True, 6, 5.0, 16), (False, 0, 0.0, 24)]
)
def test_tree_attention_in_two_plugins(
    random_trees: Any,
    monkeypatch: pytest.MonkeyPatch,
    sinks: bool,
    dynamic: bool,
    window: int,
    softcap: float,
    value_size: int,
) -> None:
    monkeypatch.setattr("specstep.kernels.tree_attention.plugin.PROGRAMS", 8)  # fewer splits: the interpreter is slow
    generator = torch.Generator().manual_seed(4)
    parents, valid = trees(random_trees, batch=2)
    ancestors, depths = tree_layout(parents, valid)
    q = torch.randn(2, 4, NODES, 16, generator=generator)
    k, v = (torch.randn(2, 2, 40, size, generator=generator) for size in (16, value_size))
    where = [torch.tensor([17, 0]), depths, ancestors, depths]
    attributes = {"scale": 0.25, "window": window, "softcap": softcap}
    split = launch("tree_attention_split", [q, k, v, *where], dynamic=dynamic, **attributes)
    logits = torch.randn(4, generator=generator) if sinks else torch.full((4,), -torch.inf)
    (got,) = launch("tree_attention_merge", [*split, logits], dynamic=dynamic)
    want = tree_attention(q, k, v, *where, **attributes, sinks=logits if sinks else None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_dynamic_nodes_where_a_kernel_needs_them_are_refused() -> None:
    shapes = {"parents": (DYNAMIC, DYNAMIC), "valid": (DYNAMIC, DYNAMIC)}
    with pytest.raises(ValueError, match="tree_layout: nodes: expected a size that is fixed at build"):
        PLUGINS["tree_layout"].case("", shapes, {})

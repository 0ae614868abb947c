"""The bits of tree attention on a CPU: each query has those that it has when it is decoded alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import Case, brute_force, make_case
from specstep.kernels.bits import chain_bits, pack_bits, unpack_bits
from specstep.kernels.int8_rows import quantize_rows
from specstep.kernels.tree_attention import reference
from specstep.kernels.tree_attention.op import tree_attention
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 63, 64, 65, 1000)
HEADS = ((3, 1), (9, 3), (8, 1), (2, 2))
SIZES = ((64, 64), (40, 80), (80, 40), (128, 128), (256, 256), (33, 17), (512, 512), (700, 321))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 70},
    "narrow": {"window": 2},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "all": {"window": 300, "softcap": 20.0, "sinks": torch.linspace(-2, 3, 8)},
}
Op = Callable[..., Tensor]


def run(op: Op, case: Case) -> Tensor:
    return op(*case.args("cpu"))


def with_garbage(case: Case) -> Case:
    """What no query sees holds what is left of other rows: keys that are not even numbers."""
    k, v = case.k.clone(), case.v.clone()
    for row, length in enumerate(case.lengths.tolist()):
        k[row, :, length + case.key_depths.shape[1] :] = torch.nan
        v[row, :, length + case.key_depths.shape[1] :] = 6e4
    return replace(case, k=k, v=v)


def alone(op: Op, case: Case, row: int, node: int) -> Tensor:
    """One query where its ancestors are committed, in the order of their depths and then their numbers: [H, DV]."""
    length = int(case.lengths[row])
    bits, depths = unpack_bits(case.ancestors[row, node], case.key_depths.shape[1]), case.key_depths[row]
    path = sorted(bits.nonzero()[:, 0].tolist(), key=lambda key: (int(depths[key]), key))
    slots = [*range(length), *(length + key for key in path)]
    before, zero = len(slots) - 1, torch.zeros(1, 1, dtype=torch.int64)
    one = replace(
        case,
        q=case.q[row : row + 1, :, node : node + 1],
        **{name: getattr(case, name)[row : row + 1, :, slots] for name in ("k", "v")},
        lengths=torch.tensor([before]),
        depths=zero,
        key_depths=zero,
        ancestors=zero[None].int() + 1,
    )
    return run(op, one)[0, 0]


def check(op: Op, case: Case) -> None:
    got = run(op, case)
    for row in range(got.shape[0]):
        for node in range(got.shape[1]):
            assert torch.equal(got[row, node], alone(op, case, row, node)), (row, node)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 7, 16, 64])
def test_nodes_of_a_tree(random_trees: Any, nodes: int, dtype: torch.dtype, threads: int) -> None:
    case = make_case(random_trees, nodes, 9, 3, 64, LENGTHS, dtype, seed=nodes)
    check(tree_attention, with_garbage(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(random_trees: Any, options: str, dtype: torch.dtype) -> None:
    case = make_case(random_trees, 21, 8, 2, 64, (0, 60, 65, 310), dtype)
    check(tree_attention, with_garbage(replace(case, **OPTIONS[options])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_heads(random_trees: Any, heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(random_trees, 6, *heads, sizes[0], (3, 126, 255), dtype, value_dim=sizes[1])
    check(tree_attention, with_garbage(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (40, 80), (33, 17), (256, 256)], ids=str)
def test_a_cache_of_eight_bits(random_trees: Any, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(random_trees, 9, 6, 2, sizes[0], (0, 65, 310), dtype, value_dim=sizes[1])
    check(tree_attention, replace(case, k=quantize_rows(case.k), v=quantize_rows(case.v)))


def test_the_reference_is_not_exact(random_trees: Any) -> None:
    """So the tests above can fail."""
    with pytest.raises(AssertionError):
        check(reference.tree_attention, make_case(random_trees, 16, 9, 3, 64, LENGTHS))


def prefill(case: Case, cuts: list[int]) -> Tensor:
    """A text, in chunks of these sizes."""
    parts, length = [], 0
    for size in cuts:
        depths = torch.arange(size)[None]
        bits = chain_bits(size, size // 32 + 1, depths.device)[None]
        where = {"lengths": torch.tensor([length]), "depths": depths, "key_depths": depths, "ancestors": bits}
        parts.append(run(tree_attention, replace(case, q=case.q[:, :, length : length + size], **where)))
        length += size
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "window", "all"])
def test_chunks_of_a_prompt(random_trees: Any, options: str, dtype: torch.dtype, threads: int) -> None:
    case = replace(make_case(random_trees, 600, 8, 2, 64, (0,), dtype), **OPTIONS[options])
    whole = prefill(case, [600])
    for cuts in ([1] * 600, [64] * 9 + [24], [7, 256, 1, 63, 65, 208], [512, 88]):
        assert torch.equal(prefill(case, cuts), whole), cuts


@pytest.mark.parametrize("window", [0, 1, 5])
def test_keys_that_share_a_depth_or_leave_one_out(window: int, random_trees: Any) -> None:
    """They are added by depth, then by number, though no tree has such masks."""
    draw = torch.Generator().manual_seed(1)
    case = make_case(random_trees, 40, 4, 2, 32, (0, 50, 64))
    bits = torch.rand(3, 40, 40, generator=draw) < 0.4
    bits[:, :20, :10] = torch.arange(10) <= torch.randint(10, (3, 20, 1), generator=draw)
    depths = torch.randint(12, (3, 40), generator=draw)
    depths[:2, :10] = torch.arange(10)
    case = replace(case, ancestors=pack_bits(bits), key_depths=depths, window=window)
    torch.testing.assert_close(run(tree_attention, case).double(), brute_force(case), rtol=2e-5, atol=2e-5)
    if window == 0:
        check(tree_attention, replace(case, ancestors=pack_bits(bits | (torch.arange(40) == 0))))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("nodes", [1, 40])
def test_float32_is_as_accurate_as_the_reference(random_trees: Any, nodes: int, options: str) -> None:
    case = replace(make_case(random_trees, nodes, 8, 2, 128, (0, 900, 65)), **OPTIONS[options])
    exact = brute_force(case)
    error, theirs = (
        (run(op, case).double() - exact).square().mean().sqrt() for op in (tree_attention, reference.tree_attention)
    )
    # The reference's products are the machine's library's, which on some are exact to the last place where few add up.
    assert error <= max(1.5 * theirs, torch.finfo(torch.float32).eps * exact.square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_accurate_as_the_reference(random_trees: Any, dtype: torch.dtype) -> None:
    case = make_case(random_trees, 16, 9, 3, 64, LENGTHS, dtype)
    exact = brute_force(case)
    errors = [
        (run(op, case).double() - exact).square().mean().sqrt() for op in (tree_attention, reference.tree_attention)
    ]
    assert errors[0] <= errors[1]

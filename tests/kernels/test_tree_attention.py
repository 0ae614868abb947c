"""Tree attention against a float64 loop over queries."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_case import Case, brute_force, make_case
from specstep.kernels.bits import pack_bits, unpack_bits
from specstep.kernels.int8_rows import quantize_rows, widen_rows
from specstep.kernels.tree_attention.op import tree_attention as tree_attention_op
from torch import Tensor


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes with the number of programs."""
    if "backend" in request.fixturenames and request.getfixturevalue("backend").name == "interpreter":
        monkeypatch.setattr("specstep.kernels.tree_attention.blocks.PROGRAMS", 12)


def check(backend: Any, case: Case) -> None:
    expected = brute_force(case)
    got = backend.op("tree_attention")(*case.args(backend.device))
    assert got.dtype == case.q.dtype
    assert got.is_contiguous()
    # The reference multiplies half-precision matrices as transformers does: scores are rounded to the dtype.
    tolerance = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[case.q.dtype]
    torch.testing.assert_close(got.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 8, 34, 65])
def test_tree_sizes(backend: Any, random_trees: Any, nodes: int, dtype: torch.dtype) -> None:
    check(backend, make_case(random_trees, nodes=nodes, dtype=dtype, seed=nodes))


def test_largest_tree(backend: Any, random_trees: Any) -> None:
    check(backend, make_case(random_trees, nodes=130, heads=2, kv_heads=1, lengths=(0, 40)))


def test_bfloat16(backend: Any, random_trees: Any) -> None:
    if backend.name == "interpreter":
        pytest.skip("the interpreter's bfloat16 arithmetic is wrong")
    if backend.name == "onnx":
        pytest.skip("ONNX Runtime has no bfloat16 MatMul on a CPU")
    check(backend, make_case(random_trees, dtype=torch.bfloat16))


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (9, 3), (8, 1)], ids=str)
def test_heads(backend: Any, random_trees: Any, heads: tuple[int, int], head_dim: int) -> None:
    case = make_case(random_trees, nodes=5, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, lengths=(9, 0, 66))
    check(backend, case)


@pytest.mark.parametrize("sizes", [(192, 128), (24, 16), (16, 48)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_of_another_size(backend: Any, random_trees: Any, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Multi-head latent attention: DeepSeek-V3 has keys of 192 and values of 128."""
    case = make_case(random_trees, nodes=9, dtype=dtype, head_dim=sizes[0], value_dim=sizes[1])
    check(backend, replace(case, sinks=torch.randn(4), window=40, softcap=20.0))
    check(backend, replace(case, lengths=torch.tensor([0, 12, 3])))


@pytest.mark.parametrize("scale", [128**-0.5, 0.01, 0.0])
def test_scores_beyond_float16_before_they_are_scaled(backend: Any, random_trees: Any, scale: float) -> None:
    """Those that are scaled by a power of 2 first are exact here: keys differ by their last places."""
    case = make_case(random_trees, nodes=5, heads=2, kv_heads=1, head_dim=128, lengths=(9, 40), dtype=torch.float16)
    q, k = torch.full_like(case.q, 32.0), 20 + case.k[..., :1].sign().expand_as(case.k) / 64
    assert (q[0, 0, 0].float() @ k[0, 0, 0].float()) > torch.finfo(torch.float16).max
    check(backend, replace(case, q=q, k=k, scale=scale, softcap=2000.0 if scale else 0.0))
    check(backend, replace(case, q=q, k=k, scale=scale))


def test_a_scale_of_one(backend: Any, random_trees: Any) -> None:
    """Gemma 4's, and what Granite may have."""
    check(backend, replace(make_case(random_trees, nodes=5), scale=1.0))


@pytest.mark.parametrize("window", [1, 2, 7, 64, 65, 1000])
def test_window(backend: Any, random_trees: Any, window: int) -> None:
    check(backend, replace(make_case(random_trees, nodes=9, lengths=(3, 140, 64)), window=window))


@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap(backend: Any, random_trees: Any, softcap: float) -> None:
    case = make_case(random_trees)
    check(backend, replace(case, q=case.q * 20, softcap=softcap))


def test_sinks(backend: Any, random_trees: Any) -> None:
    case = make_case(random_trees)
    check(backend, replace(case, sinks=torch.tensor([-3.0, 0.0, 2.0, 30.0])))
    check(backend, replace(case, sinks=torch.randn(4), window=3, softcap=30.0))


@pytest.mark.parametrize("sinks", [None, torch.randn(4)], ids=["plain", "sinks"])
def test_queries_that_see_nothing_get_zero(backend: Any, random_trees: Any, sinks: Tensor | None) -> None:
    case = make_case(random_trees, lengths=(0, 0))
    case = replace(case, ancestors=torch.zeros_like(case.ancestors), sinks=sinks)
    check(backend, case)
    got = backend.op("tree_attention")(*case.args(backend.device))
    assert torch.count_nonzero(got) == 0


@pytest.mark.parametrize("keys", [9, 40])
def test_draft_level_sees_earlier_levels(backend: Any, random_trees: Any, keys: int) -> None:
    """The queries are the last four of M nodes: M > T."""
    case = make_case(random_trees, nodes=keys)
    last = slice(keys - 4, keys)
    check(
        backend,
        replace(case, q=case.q[:, :, last], depths=case.depths[:, last], ancestors=case.ancestors[:, last], window=6),
    )


def test_more_words_than_keys(backend: Any, random_trees: Any) -> None:
    """Words and bits beyond M are not looked at."""
    case = make_case(random_trees)
    bits = torch.cat((unpack_bits(case.ancestors, 8), torch.ones(3, 8, 60, dtype=torch.bool)), -1)
    check(backend, replace(case, ancestors=pack_bits(bits)))


def test_tree_beyond_the_cache_is_not_seen(backend: Any, random_trees: Any) -> None:
    case = make_case(random_trees)
    check(backend, replace(case, k=case.k[:, :, :73], v=case.v[:, :, :73]))


@pytest.mark.parametrize("value", [3e38, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_scores_of_unseen_slots_stay_unseen(backend: Any, random_trees: Any, softcap: float, value: float) -> None:
    """What a pass that overflowed left in the keys behind a row."""
    case = make_case(random_trees, lengths=(0, 20, 33))
    k = case.k.clone()
    k[:, :, 41:] = 0  # behind every row's tree
    k[:, :, 41:, 0] = value
    case = replace(case, q=case.q * 4, k=k, softcap=softcap)
    assert not torch.isfinite(case.q[..., 0] * value).all()
    check(backend, case)


def test_transposed_cache(backend: Any, random_trees: Any) -> None:
    case = make_case(random_trees)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.k, case.v))
    check(backend, replace(case, k=k, v=v))


@pytest.mark.parametrize(
    ("programs", "window"), [(1, 0), (9, 200), (100, 0), pytest.param(100, 200, marks=pytest.mark.slow)]
)
def test_long_row_beside_short_ones(
    backend: Any, random_trees: Any, monkeypatch: pytest.MonkeyPatch, programs: int, window: int
) -> None:
    """From one split that takes all blocks to more splits than blocks."""
    if backend.name not in ("reference", "op", "onnx"):
        monkeypatch.setattr("specstep.kernels.tree_attention.blocks.PROGRAMS", programs)
    case = make_case(random_trees, nodes=36, heads=2, kv_heads=1, lengths=(700, 0, 7))
    check(backend, replace(case, window=window))


@pytest.mark.parametrize("sizes", [(64, 64), (16, 48), (100, 36), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_cache_of_eight_bits(backend: Any, random_trees: Any, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """What its numbers stand for is attended to; only C++ and the reference read it."""
    if backend.name not in ("reference", "op"):
        pytest.skip("a CPU's caches alone are int8")
    case = make_case(random_trees, nodes=9, dtype=dtype, head_dim=sizes[0], value_dim=sizes[1])
    case = replace(case, sinks=torch.randn(4), window=40, softcap=20.0)
    k, v = quantize_rows(case.k), quantize_rows(case.v)
    expected = brute_force(replace(case, k=widen_rows(k), v=widen_rows(v)))
    got = backend.op("tree_attention")(*replace(case, k=k, v=v).args("cpu"))
    assert got.dtype == dtype and got.is_contiguous()
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]  # of rounding what is returned
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value_dim", [32, 16])
@pytest.mark.parametrize("sinks", [None, torch.randn(4)], ids=["plain", "sinks"])
def test_opcheck(random_trees: Any, sinks: Tensor | None, value_dim: int) -> None:
    case = make_case(random_trees, value_dim=value_dim)
    torch.library.opcheck(tree_attention_op, tuple(replace(case, sinks=sinks, window=4, softcap=20.0).args("cpu")))


def test_opcheck_of_a_cache_of_eight_bits(random_trees: Any) -> None:
    case = make_case(random_trees, value_dim=48)
    case = replace(case, k=quantize_rows(case.k), v=quantize_rows(case.v))
    torch.library.opcheck(tree_attention_op, tuple(case.args("cpu")))


def test_refusals_name_expected_and_got(random_trees: Any) -> None:
    case = make_case(random_trees)
    with pytest.raises(ValueError, match="expected a multiple of the 2 key heads, got 3"):
        tree_attention_op(*replace(case, q=case.q[:, :3]).args("cpu"))
    with pytest.raises(ValueError, match="q: expected heads of size 32, as the keys have, got 16"):
        tree_attention_op(*replace(case, q=case.q[..., :16]).args("cpu"))
    with pytest.raises(ValueError, match="expected >= 2 words for 33 tree keys, got 1"):
        tree_attention_op(*replace(case, key_depths=torch.zeros(3, 33, dtype=torch.int64)).args("cpu"))
    with pytest.raises(ValueError, match="scale: expected >= 0, got -1"):
        tree_attention_op(*replace(case, scale=-1.0).args("cpu"))
    with pytest.raises(ValueError, match="expected one dtype"):
        tree_attention_op(*replace(case, q=case.q.half()).args("cpu"))
    with pytest.raises(ValueError, match=r"expected one dtype, or int8 for k and v, got .*int8, torch\.float32"):
        tree_attention_op(*replace(case, k=quantize_rows(case.k)).args("cpu"))
    with pytest.raises(ValueError, match="q: expected heads of size 30, as the keys have, got 32"):
        tree_attention_op(*replace(case, k=case.k.to(torch.int8), v=case.v.to(torch.int8)).args("cpu"))

"""Linear attention over trees, and the commits of its path and of a short convolution's."""

from inspect import unwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.fold.op import fold
from specstep.kernels.fold.reference import folded
from specstep.kernels.linear_attention import reference
from specstep.kernels.linear_attention.op import linear_attention
from specstep.kernels.shift.op import shift, shifted
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule


def inputs(batch: int, tokens: int, groups: int, heads: int, n: int, p: int, decay_by: str, delta: bool) -> list[Any]:
    """decay_by: what a state is decayed by, one of KINDS."""
    torch.manual_seed(batch + 7 * tokens + 31 * heads + 101 * n)
    query, key = torch.nn.functional.normalize(torch.randn(2, batch, tokens, groups, n), dim=-1)
    value = torch.randn(batch, tokens, heads, p)
    decay = torch.rand(batch, tokens, heads, {"one number": 1, "rows": n, "rates": p}[decay_by])
    rates = -torch.rand(heads, n, p) if decay_by == "rates" else None
    beta = torch.rand(batch, tokens, heads) if delta else None
    return [query, key, value, decay, rates, beta, torch.randn(batch, heads, n, p)]


KINDS = ["one number", "rows", "rates"]


def tree(batch: int, tokens: int) -> Tensor:
    """Random parents: what follows the committed tokens may be several."""
    return torch.stack([(torch.rand(batch) * (t + 1)).long() - 1 for t in range(tokens)], 1)


def path_to(parents: Tensor, row: int, token: int) -> list[int]:
    path = [token]
    while int(parents[row, path[0]]) >= 0:
        path.insert(0, int(parents[row, path[0]]))
    return path


sizes = given(
    st.integers(1, 3), st.integers(1, 9), st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    st.sampled_from([(1, 1), (3, 5), (16, 8), (32, 32), (5, 109), (16, 64)]), st.sampled_from(KINDS), st.booleans(),
)  # fmt: skip


@settings(deadline=None, max_examples=40)
@sizes
def test_equals_the_reference(backend, batch, tokens, heads, size, decay_by, delta):
    given, parents = inputs(batch, tokens, *heads, *size, decay_by, delta), tree(batch, tokens)
    for place in (parents, None):
        expected = reference.linear_attention(*given, place)
        for got, wanted in zip(on(backend, "linear_attention", *given, place), expected, strict=True):
            torch.testing.assert_close(got, wanted)


@settings(deadline=None, max_examples=25)
@sizes
def test_a_node_is_its_chain_and_so_is_the_state_that_it_leaves(backend, batch, tokens, heads, size, decay_by, delta):
    """To the bit, but for ONNX Runtime, whose sums depend on what is beside them."""
    same = torch.testing.assert_close if backend.name in ("onnx", "reference") else exactly
    given, parents = inputs(batch, tokens, *heads, *size, decay_by, delta), tree(batch, tokens)
    out, written = on(backend, "linear_attention", *given, parents)
    row, token, rates, state = batch - 1, tokens - 1, given[4], given[6]
    path = path_to(parents, row, token)
    alone = [x if x is None or x is rates else x[row : row + 1, path].contiguous() for x in given[:6]]
    chain, _ = on(backend, "linear_attention", *alone, state[row : row + 1], None)
    same(chain[0, -1], out[row, token])
    # Token by token, as plain decoding goes, and all of the path at once.
    plain, whole = state[row : row + 1].clone(), state.clone()
    for step in range(len(path)):
        one = [x if x is None or x is rates else x[:, step : step + 1].contiguous() for x in alone]
        last, u = on(backend, "linear_attention", *one, plain, None)
        on(backend, "fold", plain, one[1], one[3], rates, u, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1).long())
    same(last[0, 0], out[row, token])
    padded = torch.tensor([path + [0] * (tokens - len(path))]).expand(batch, -1)
    counts = torch.zeros(batch, dtype=torch.int64)
    counts[row] = len(path)
    on(backend, "fold", whole, given[1], given[3], rates, written, padded, counts)
    same(whole[row], plain[0])
    assert torch.equal(whole[:row], state[:row])
    torch.testing.assert_close(folded(state, given[1], given[3], rates, written, padded, counts), whole)


def exactly(got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got, expected)


def on(backend: Any, kernel: str, *inputs: Any) -> Any:
    """What a backend computes of CPU tensors; the first is written where the kernel writes."""
    moved = [x if x is None else x.to(backend.device) for x in inputs]
    result = backend.op(kernel)(*moved)
    if result is None:
        inputs[0].copy_(moved[0])
        return None
    return [x.cpu() for x in result]


def test_equals_transformers():
    query, key, value, decay, _, beta, state = inputs(2, 12, 2, 4, 16, 8, "one number", True)
    got, _ = linear_attention(query * 16**-0.5, key, value, decay, None, beta, state, None)
    expected, _ = torch_recurrent_gated_delta_rule(query, key, value, decay[..., 0].log(), beta, initial_state=state)
    torch.testing.assert_close(got, expected)


def test_equals_transformers_mamba():
    channels, size = 8, 6
    x, dt = torch.randn(2, 2, channels, 5)
    rates, b, c = -torch.rand(channels, size), *torch.randn(2, 2, size, 5)
    expected, after = unwrap(mamba_selective_scan)(x, dt.abs(), rates, b, c, return_last_state=True)
    value, steps = (part.transpose(1, 2).unflatten(2, (2, 4)) for part in (x * dt.abs(), dt.abs()))
    query, key = (part.transpose(1, 2)[:, :, None] for part in (c, b))
    by_head, state = rates.view(2, 4, size).mT.contiguous(), torch.zeros(2, 2, size, 4)
    got, written = linear_attention(query, key, value, steps, by_head, None, state, None)
    torch.testing.assert_close(got.flatten(2).mT, expected)
    fold(state, key, steps, by_head, written, torch.arange(5).expand(2, -1), torch.tensor([5, 5]))
    torch.testing.assert_close(state.mT.flatten(1, 2), after)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("decay", ["one number", "rates"])
def test_a_value_that_is_not_finite_stays_in_its_branch(backend, decay, value):
    given = inputs(1, 3, 1, 2, 4, 4, decay, True)
    parents, steps = torch.tensor([[-1, 0, 0]]), (torch.tensor([[0, 2]]), torch.tensor([2]))
    clean, _ = on(backend, "linear_attention", *given, parents)
    given[2][:, 1] = value
    out, written = on(backend, "linear_attention", *given, parents)
    assert torch.equal(out[:, [0, 2]], clean[:, [0, 2]]) and not out[:, 1].isfinite().any()
    state = given[6].clone()
    on(backend, "fold", state, given[1], given[3], given[4], written, *steps)
    assert state.isfinite().all()
    window, rows = torch.zeros(1, 3, 4), torch.randn(1, 3, 4)
    rows[:, 1] = value
    shift(window, rows, *steps)
    assert window.isfinite().all() and window[:, -1].equal(rows[:, 2])


@pytest.mark.parametrize("parents", [[[0]], [[-2]], [[-1, 1]]])
def test_parents_that_are_none_are_refused(parents):
    given = inputs(1, len(parents[0]), 1, 1, 2, 2, "rates", False)
    with pytest.raises(ValueError, match="parents: expected -1 to t - 1"):
        linear_attention(*given, torch.tensor(parents))


def test_shapes_that_do_not_fit_are_refused():
    given = inputs(1, 2, 2, 4, 4, 4, "rates", True)
    messages = {0: "key: expected heads", 3: "decay: expected 4 heads of 4", 4: "rates: expected", 6: "rates: expected"}
    for place, message in messages.items():
        wrong = list(given)
        wrong[place] = wrong[place][:, :, :1] if place != 6 else wrong[place][:, :1]
        with pytest.raises(ValueError, match=message):
            linear_attention(*wrong, None)
    with pytest.raises(ValueError, match="expected float32"):
        linear_attention(given[0].double(), *given[1:], None)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.data())
def test_a_window_moves_along_the_path(batch, tokens, size, channels, data):
    window = torch.arange(batch * size * channels, dtype=torch.bfloat16).view(batch, size, channels)
    given = 1000 + torch.arange(batch * tokens * channels, dtype=torch.bfloat16).view(batch, tokens, channels)
    counts = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
    path = torch.stack([torch.randperm(tokens).sort().values for _ in range(batch)])
    expected = []
    for row, count in enumerate(counts):
        expected.append(torch.cat([window[row], given[row, path[row, :count]]])[-size:])
    new = shifted(window, given, path, torch.tensor(counts))
    shift(window, given, path, torch.tensor(counts))
    assert torch.equal(window, torch.stack(expected)) and torch.equal(new, window)

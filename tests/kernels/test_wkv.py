"""RWKV's attention over trees, in whose commits `shift` moves the states of its tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specstep.kernels.shift.op import shift
from specstep.kernels.wkv import reference
from specstep.kernels.wkv.op import wkv
from torch import Tensor
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu


def inputs(batch: int, tokens: int, channels: int, fresh: bool) -> list[Tensor]:
    """fresh: nothing is committed yet."""
    torch.manual_seed(batch + 7 * tokens + 31 * channels)
    key, value = torch.randn(2, batch, tokens, channels) * torch.tensor([4.0, 1.0])[:, None, None, None]
    decay, first = -torch.rand(channels), torch.randn(channels)
    state = torch.randn(batch, 3, channels)
    state[:, 1] = 1 + state[:, 1].abs()
    return [key, value, decay, first, torch.zeros_like(state) if fresh else state]


def tree(batch: int, tokens: int) -> Tensor:
    """Random parents: what follows the committed tokens may be several."""
    return torch.stack([(torch.rand(batch) * (t + 1)).long() - 1 for t in range(tokens)], 1)


def path_to(parents: Tensor, row: int, token: int) -> list[int]:
    path = [token]
    while int(parents[row, path[0]]) >= 0:
        path.insert(0, int(parents[row, path[0]]))
    return path


def on(backend: Any, *given: Any) -> list[Tensor]:
    """What a backend computes of CPU tensors."""
    moved = [x if x is None else x.to(backend.device) for x in given]
    return [x.cpu() for x in backend.op("wkv")(*moved)]


sizes = given(st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 5, 48, 300]), st.booleans())


@settings(deadline=None, max_examples=20)
@sizes
def test_equals_the_reference(backend, batch, tokens, channels, fresh):
    given, parents = inputs(batch, tokens, channels, fresh), tree(batch, tokens)
    for place in (parents, None):
        for got, wanted in zip(on(backend, *given, place), reference.wkv(*given, place), strict=True):
            torch.testing.assert_close(got, wanted)


@settings(deadline=None, max_examples=15)
@sizes
def test_a_node_is_its_chain_and_so_is_the_state_that_it_leaves(backend, batch, tokens, channels, fresh):
    """To the bit, but for ONNX Runtime and torch, whose exponentials depend on what is beside them."""
    exact = backend.name not in ("onnx", "reference")
    same = (lambda got, wanted: torch.testing.assert_close(got, wanted, rtol=0, atol=0)) if exact else (
        torch.testing.assert_close
    )  # fmt: skip
    (key, value, decay, first, state), parents = inputs(batch, tokens, channels, fresh), tree(batch, tokens)
    out, states = on(backend, key, value, decay, first, state, parents)
    row, token = batch - 1, tokens - 1
    path = path_to(parents, row, token)
    k, v, kept = (x[row : row + 1].contiguous() for x in (key[:, path], value[:, path], state))
    chain, left = on(backend, k, v, decay, first, kept, None)
    same(chain[0, -1], out[row, token])
    same(left[0, -1], states[row, token])
    for step in range(len(path)):  # as plain decoding goes
        one = slice(step, step + 1)
        last, plain = on(backend, k[:, one].contiguous(), v[:, one].contiguous(), decay, first, kept, None)
        kept = plain[:, 0]
    same(last[0, 0], out[row, token])
    same(kept[0], states[row, token])
    half = len(path) // 2  # chunks of a prompt
    if half:
        _, before = on(
            backend, k[:, :half].contiguous(), v[:, :half].contiguous(), decay, first, state[row][None], None
        )
        rest, _ = on(backend, k[:, half:].contiguous(), v[:, half:].contiguous(), decay, first, before[:, -1], None)
        same(rest[0, -1], out[row, token])


def test_equals_transformers():
    """From nothing, and from a state; exponents whose own exponentials are no floats."""
    key, value, decay, first, _ = inputs(2, 12, 7, True)
    key[:, 3], key[0, 5], key[1, 7:] = 150.0, -200.0, -150.0
    speed = torch.log(-decay)
    expected, after = rwkv_linear_attention_cpu(speed, first, key, value, return_state=True)
    got, states = wkv(key, value, decay, first, torch.zeros(2, 3, 7), None)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(states[:, -1], torch.stack(after, 1))
    expected, _ = rwkv_linear_attention_cpu(speed, first, key, value, state=after)
    torch.testing.assert_close(wkv(key, value, decay, first, torch.stack(after, 1), None)[0], expected)
    low = torch.full_like(key, -200.0)  # the first token of a row alone
    torch.testing.assert_close(wkv(low, value, decay, first, torch.zeros(2, 3, 7), None)[0][:, 0], value[:, 0])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_stays_in_its_branch(backend, value):
    given, parents = inputs(1, 3, 4, False), torch.tensor([[-1, 0, 0]])
    clean, _ = on(backend, *given, parents)
    for place in (0, 1):
        spoilt = list(given)
        spoilt[place] = given[place].clone()
        spoilt[place][:, 1] = value
        out, states = on(backend, *spoilt, parents)
        assert torch.equal(out[:, [0, 2]], clean[:, [0, 2]]) and not out[:, 1].isfinite().any()
        state = given[4].view(1, 1, -1).clone()
        shift(state, states.flatten(2), torch.tensor([[0, 2]]), torch.tensor([2]))
        assert torch.equal(state.view(3, 4), states[0, 2]) and state.isfinite().all()


@pytest.mark.parametrize("parents", [[[0]], [[-2]], [[-1, 1]]])
def test_parents_that_are_none_are_refused(parents):
    with pytest.raises(ValueError, match="parents: expected -1 to t - 1"):
        wkv(*inputs(1, len(parents[0]), 2, True), torch.tensor(parents))


def test_shapes_that_do_not_fit_are_refused():
    given = inputs(1, 2, 4, True)
    for place, message in {2: "decay: expected", 3: "first: expected", 4: "state: expected"}.items():
        wrong = list(given)
        wrong[place] = wrong[place][..., :3]
        with pytest.raises(ValueError, match=message):
            wkv(*wrong, None)
    with pytest.raises(ValueError, match="expected float32"):
        wkv(given[0].double(), *given[1:], None)

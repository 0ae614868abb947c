"""The choice op: what is kept and what is not at the edges, and that each device's kernel is the reference."""

import pytest
import torch
from specstep.kernels.choose import reference
from specstep.kernels.tree_layout.op import tree_layout

VOCABULARY = 8
OFF = [0.0] * 7


def row(logits, sampling=OFF, tokens=(0,), prompt=1, seed=0, **changes):
    """One row with the bare root as its tree. logits: [V] for one place, or [N, V] for as many rows of it."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    logits = logits.expand(1, -1) if logits.dim() == 1 else logits
    batch, vocabulary = logits.shape
    same = torch.ones(batch, 1, dtype=torch.int64)
    seeds = torch.arange(batch) + seed
    given = {
        "logits": logits[:, None],
        "tokens": same * tokens[-1],
        "ancestors": same.int()[:, None],
        "depths": same * 0,
        "history": torch.tensor([list(tokens)]).expand(batch, -1).contiguous(),
        "lengths": same[:, 0] * (len(tokens) - 1),
        "prompt_lengths": same[:, 0] * prompt,
        "sampling": torch.tensor([list(sampling)], dtype=torch.float32).expand(batch, -1).contiguous(),
        "seeds": seeds,
        "bias_ids": same * -1,
        "bias": same * 0.0,
        "banned": -same[:, None],
        "allowed": torch.full((batch, 1, (vocabulary + 31) // 32), -1, dtype=torch.int32),
        "masked": same[:, 0] * 0,
    }
    return given | changes


def chosen(op, *given, draws=2000, **changes):
    """The set of tokens that so many draws from these logits give."""
    logits = torch.tensor(given[0]).expand(draws, -1)
    return set(op(**row(logits, *given[1:], **changes)).flatten().tolist())


@pytest.fixture(scope="module")
def op(host):
    choose = host.op("choose")
    return lambda *given, **named: choose(*given, *named.values())


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ([1, 0, 0, 0], {0, 1, 2, 3, 4, 5}),
        ([1, 1, 0, 0], {0}),
        ([1, 2, 0, 0], {0, 1, 2}),  # 1 and 2 are equal
        ([1, 3, 0, 0], {0, 1, 2}),
        ([1, 4, 0, 0], {0, 1, 2, 3}),
        ([1, 99, 0, 0], {0, 1, 2, 3, 4, 5}),
        ([1, 0, 1e-9, 0], {0}),
        ([1, 0, 0.29, 0], {0}),
        ([1, 0, 0.31, 0], {0, 1, 2}),  # as above
        ([1, 0, 0.69, 0], {0, 1, 2}),
        ([1, 0, 0.71, 0], {0, 1, 2, 3}),
        ([1, 0, 0.91, 0], {0, 1, 2, 3, 4}),
        ([1, 0, 0.99, 0], {0, 1, 2, 3, 4, 5}),
        ([1, 0, 0, 1.0], {0}),
        ([1, 0, 0, 0.66], {0, 1, 2}),
        ([1, 0, 0, 0.68], {0}),
        ([1, 0, 0, 0.4], {0, 1, 2, 3}),
        ([2, 0, 0, 0.75], {0, 1, 2}),  # after the temperature: sqrt(2 / 3) is 0.82
        ([1, 3, 0.8, 0], {0, 1, 2}),
        ([1, 3, 0.42, 0], {0}),  # of what top-k keeps, 0.3 is 3 / 7
        ([1, 3, 0.43, 0], {0, 1, 2}),
        ([1, 0, 0.71, 0.55], {0, 1, 2}),
        ([1e-4, 0, 0, 0], {0}),
    ],
    ids=str,
)
def test_what_the_filters_keep(op, sampling, kept):
    """Of the probabilities 0.3, 0.2, 0.2, 0.15 (so 0.7 before it), 0.1, 0.05, and twice none."""
    logits = [p and 5 + torch.tensor(p).log().item() for p in (0.3, 0.2, 0.2, 0.15, 0.1, 0.05)] + [-torch.inf] * 2
    shares = torch.tensor(logits).softmax(0)
    assert shares[:3].sum() < 0.71 and shares[:4].sum() > 0.84
    assert chosen(op, logits, [*sampling, 0, 0, 0]) == kept


def test_what_has_no_probability_is_never_chosen(op):
    """At no temperature, and though it has by far the largest logits: banned, masked, -inf, or biased away."""
    for temperature in (0.0, 0.5, 3.0):
        sampling = [temperature, 0, 0, 0, 0, 0, 0]
        logits = [[90.0, 80, 70, 60, -torch.inf, 50, 1, 2]]
        ban = torch.tensor([[[0, 5, -1]]]).expand(500, -1, -1)
        given = row(torch.tensor(logits).expand(500, -1), sampling, banned=ban)
        given["bias_ids"] = torch.tensor([[-1, 1]]).expand(500, -1)
        given["bias"] = torch.tensor([[7.0, -torch.inf]]).expand(500, -1)
        given["masked"][:] = 1
        given["allowed"][:] = 0b11110011
        got = set(op(**given).flatten().tolist())
        assert got <= {6, 7} and (got == {7} or temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_is_left(op, temperature):
    given = row([1.0] * VOCABULARY, [temperature, 3, 0.5, 0.1, 0, 0, 0])
    given["masked"][:], given["allowed"][:] = 1, 0
    assert op(**given).tolist() == [[0]]


def test_equal_logits_are_the_lowest_id(op):
    assert op(**row([1.0, 2, 5, 5, 3, 5, 0, 0])).tolist() == [[2]]
    assert op(**row([-torch.inf] * 7 + [-3.0])).tolist() == [[7]]


def test_penalties_by_hand(op):
    """History 3, 5 | 5, 6: the prompt counts for repetition alone."""
    logits = [0.0, 0, 0, 3.0, 2.0, 2.9, 2.8, -9.0]
    for penalties, best in [
        ([0.0, 0, 0], 3),
        ([2.0, 0, 0], 4),  # 1.5, 2, 1.45, 1.4
        ([1.4, 0, 0], 3),
        ([0.0, 0.95, 0], 3),
        ([0.0, -0.15, 0], 5),
        ([0.0, 0, -0.3], 5),
        ([0.5, 0, 0], 3),
    ]:
        given = row(logits, [0, 0, 0, 0, *penalties], tokens=(3, 5, 5, 6), prompt=2)
        assert op(**given).tolist() == [[best]], penalties
    negative = [-1.0, -1.1, -1.2, -0.9, -3, -3, -3, -3]  # is multiplied, not divided
    assert op(**row(negative, [0, 0, 0, 0, 2.0, 0, 0], tokens=(3, 0), prompt=2)).tolist() == [[1]]


def every_kind(many, vocabulary):
    draw = torch.Generator().manual_seed(5)

    def integers(most, *shape, least=0):
        return torch.randint(least, most, shape, generator=draw)

    nodes, slots = 7, 50
    parents = torch.cat([integers(1, many, 1) - 1, (integers(99, many, nodes - 1) % torch.arange(1, nodes))], 1)
    ancestors, depths = tree_layout(parents, integers(5, many, nodes) > 0)
    columns = [[0, 0.2, 1, 1.5], [0, 0, 1, 40, 2000], [0, 0, 0.1, 0.9], [0, 0, 0.05], *[[0, 0, 1.3, 0.6]] * 3]
    sampling = torch.stack([torch.tensor(column)[integers(len(column), many)] for column in columns], 1)
    lengths = integers(slots - 1, many)
    return (
        4 * torch.randn(many, nodes, vocabulary, generator=draw),
        integers(vocabulary, many, nodes),
        ancestors,
        depths,
        integers(vocabulary, many, slots),
        lengths,
        (integers(slots, many) % (lengths + 1)).clamp(min=1),
        sampling,
        integers(2**62, many),
        torch.rand(many, vocabulary, generator=draw).topk(20).indices.where(integers(3, many, 20) > 0, -1),
        torch.randn(many, 20, generator=draw).masked_fill(integers(3, many, 20) == 0, -torch.inf),
        integers(vocabulary, many, nodes, 9, least=-1),
        integers(2**31, many, nodes, (vocabulary + 31) // 32).int(),
        integers(2, many),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_every_kind(host, op, dtype):
    """In one batch, over trees; a vocabulary's last word of bits may be full or not."""
    if host.name == "onnx" and dtype == torch.bfloat16:
        pytest.skip("NumPy, and so ONNX Runtime's Python, has no bfloat16")
    for vocabulary in (1003, 64):
        logits, *asked = every_kind(24, vocabulary)
        given = (logits.to(dtype), *asked)
        assert torch.equal(op(*given), reference.choose(*given))


@pytest.mark.parametrize("asked", ["nothing", "noise", "filters", "penalties", "bias", "banned", "masked"])
def test_batches_of_one_kind(op, asked):
    """What no row asks for is left out, and changes nothing."""
    logits, tokens, ancestors, depths, history, *lengths, sampling, seeds, ids, bias, bans, bits, masked = every_kind(
        12, 1003
    )
    sampling[:, 0] = 1.0 if asked in ("noise", "filters") else 0.0
    sampling[:, 1:4] *= asked == "filters"
    sampling[:, 4:] *= asked == "penalties"
    ids = ids if asked == "bias" else torch.full_like(ids, -1)
    bans = bans if asked == "banned" else torch.full_like(bans, -1)
    masked = masked * (asked == "masked")
    given = (logits, tokens, ancestors, depths, history, *lengths, sampling, seeds, ids, bias, bans, bits, masked)
    expected = reference.choose(*given)
    assert torch.equal(op(*given), expected)
    assert torch.equal(expected, logits.argmax(-1)) == (asked == "nothing")

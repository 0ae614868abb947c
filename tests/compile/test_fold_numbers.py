"""What code computes of numbers alone is a number in the graph; what depends on more, or is written to, stays."""

import torch
from specstep.compile.fold_numbers import fold_numbers
from torch.export.graph_signature import InputKind


class Cut(torch.nn.Module):
    """As Gemma 3n finds where to cut its activations off."""

    def forward(self, x):
        quantile = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(0.95)).type(x.dtype)
        table = torch.tensor([1.0, 2.0, 3.0]) * torch.tensor(2.0)
        counted = torch.tensor(1.0).add_(1)
        return x * quantile + table.sum() + counted + x.sum() * torch.tensor(0.5)


class Turned(torch.nn.Module):
    """As PhiMoE turns its heads."""

    def forward(self, x):
        rates = 1.0 / (10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float32) / 12))
        return (torch.arange(5)[:, None] * rates).cos() + x


def targets(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_a_quantile_is_a_number():
    x = torch.randn(7, dtype=torch.bfloat16)
    program = torch.export.export(Cut(), (x,))
    before = targets(program)
    fold_numbers(program)
    after = targets(program)
    assert torch.ops.aten.erfinv.default in before and torch.ops.aten.erfinv.default not in after
    assert torch.equal(program.module()(x), Cut()(x)) and torch.equal(program.module()(-x), Cut()(-x))
    numbers = program.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert any(node.args[1] == 1.6484375 and node.kwargs["dtype"] == torch.bfloat16 for node in numbers)


def test_what_is_written_to_stays():
    program = torch.export.export(Cut(), (torch.randn(7),))
    fold_numbers(program)
    assert torch.ops.aten.add_.Tensor in targets(program)
    first, second = (program.module()(torch.ones(7)) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first, Cut()(torch.ones(7)))


def test_powers_of_a_range_are_held():
    x = torch.randn(5, 6)
    program = torch.export.export(Turned(), (x,))
    fold_numbers(program)
    assert torch.ops.aten.pow.Scalar not in targets(program)
    assert program.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.default), "a count of its own"
    assert torch.equal(program.module()(x), Turned()(x))
    specs = program.graph_signature.input_specs
    assert not [spec for spec in specs if spec.kind == InputKind.CONSTANT_TENSOR], "the compiler would rename it"
    (held,) = (value for name, value in program.constants.items() if name.startswith("folded_"))
    assert torch.equal(held, 1.0 / (10000.0 ** (torch.arange(0, 12, 2, dtype=torch.float32) / 12)))


class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(torch.tensor(1.0))


def test_what_is_another_number_each_time_stays():
    program = torch.export.export(Noise(), (torch.zeros(1),))
    fold_numbers(program)
    assert torch.ops.aten.rand_like.default in targets(program)

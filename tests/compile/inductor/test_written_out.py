"""Ops that are written out as sums and products of elements: torch's values, and the same bits in any company."""

import pytest
import torch
from specstep.compile.inductor.exact_walk import left_over
from specstep.compile.inductor.rewrites import make_exact
from torch.export import Dim


class Streams(torch.nn.Module):
    """As Gemma 3n mixes its streams, and cuts its activations off."""

    def __init__(self, terms: int):
        super().__init__()
        self.coefficients = torch.nn.Linear(terms, terms * terms)

    def forward(self, x):
        coefficients = self.coefficients(x.mean(2)).unflatten(-1, (x.shape[-1], x.shape[-1]))
        mixed = torch.matmul(x, coefficients)
        cut = mixed - torch.std(mixed, dim=-1, keepdim=True, unbiased=False)
        return cut, cut.permute(3, 0, 1, 2).mean(dim=0), torch.mean(cut, 2, keepdim=True)


def exported(terms, dtype):
    torch.manual_seed(0)
    module, x = Streams(terms).to(dtype), torch.randn(2, 5, 33, terms).to(dtype)
    return module, torch.export.export(module, (x,), dynamic_shapes=({1: Dim("T", min=1, max=9)},)), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_torch(dtype):
    module, program, x = exported(4, dtype)
    make_exact(program)
    ops = {str(node.target) for node in program.graph.nodes}
    assert not ops & {"aten.matmul.default", "aten.std.dim", "aten.mean.dim"}
    for got, expected in zip(program.module()(x), module(x), strict=True):
        assert got.dtype == dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=1e-6 if dtype == torch.float32 else 0.04, rtol=1e-5)


def test_a_token_alone_has_the_bits_it_has_beside_others():
    _, program, x = exported(4, torch.bfloat16)
    make_exact(program)
    run = program.module()
    together = run(x)
    for token in range(x.shape[1]):
        alone = run(x[:, token : token + 1])
        assert torch.equal(alone[0], together[0][:, token : token + 1])
        assert torch.equal(alone[1], together[1][:, token : token + 1])


class Program(torch.nn.Module):
    """The walk counts what is of its target alone."""

    def __init__(self, terms: int):
        super().__init__()
        self.module = torch.nn.Module()
        self.module.target = Product(terms)

    def forward(self, x):
        return self.module.target(x)


class Product(torch.nn.Module):
    def __init__(self, terms: int):
        super().__init__()
        self.terms = terms

    def forward(self, x):
        return torch.matmul(x, x.transpose(2, 3)) if self.terms else torch.std(x, dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("terms", "named"), [(16, []), (17, ["aten.matmul in the model (1)"]), (0, ["aten.std in the model (1)"])]
)
def test_what_is_not_written_out_is_named(terms, named):
    """More terms than a few, and a deviation of another kind than the one that is known."""
    program = torch.export.export(Program(terms), (torch.randn(2, 3, 7, terms or 5),))
    make_exact(program)
    assert left_over([program]) == named

"""What is replaced in an exported graph so that a row's bits do not depend on the other rows."""

import pytest
import torch
from specstep.compile.inductor.rewrites import make_exact
from torch import Tensor, nn
from torch.nn import functional

SIZE = 37  # no multiple of a vector


class Functions(nn.Module):
    """Every function and reduction that is replaced, each of its own x."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.rms = nn.RMSNorm(SIZE, eps=0.1)
        nn.init.uniform_(self.rms.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            functional.silu(x), torch.sigmoid(x), torch.tanh(x), torch.cos(x), torch.sin(x), functional.gelu(x),
            functional.gelu(x, approximate="tanh"), x.mean(-1, keepdim=True), x.mean(1, keepdim=True),
            torch.softmax(x, -1), torch.softmax(x, 1, dtype=torch.float32), self.norm(x),
            functional.layer_norm(x, (SIZE,)), functional.layer_norm(x, (SIZE,), eps=0.1),
            functional.softplus(x), torch.exp(x), torch.expm1(x), torch.log(x.abs() + 1),
            torch.log1p(x.abs()), x.sum(-1), x.sum(0, keepdim=True), x.sum(-2), x.mean(-1),
            self.rms(x), functional.rms_norm(x / 100, (SIZE,)), functional.rms_norm(x, (SIZE,), None, 0.2),
        ]  # fmt: skip


class Others(nn.Module):
    """What stays: several dimensions, a function over the first one, another shape of the result, another dtype."""

    def forward(self, x: Tensor) -> list[Tensor]:
        wide = x.double()
        norms = functional.layer_norm(x, (2, SIZE)), functional.rms_norm(x, (2, SIZE))
        sums = x.sum((0, 1)), x.sum(), wide.sum(-1), functional.softplus(x, 2)
        return [x.mean((0, 1)), torch.softmax(x, 0), torch.tanh(wide), *sums, *norms]


def exact(module: nn.Module, x: Tensor) -> tuple[list[str], nn.Module]:
    """The calls of the rewritten graph, and the graph."""
    exported = torch.export.export(module, (x,))
    make_exact(exported)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    return names, exported.module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_are_replaced_and_mean_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = Functions().to(dtype), (torch.randn(2, SIZE) * 4).to(dtype)
    names, graph = exact(module, x)
    assert sum(name.startswith("specstep.exact_") for name in names) == 26
    tolerances = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    with torch.no_grad():
        for got, expected in zip(graph(x), module(x), strict=True):
            torch.testing.assert_close(got, expected, **tolerances)


class Gates(nn.Module):
    """An activation and its gate, on either side; then what is no gate: a function of two users, a factor of another
    shape, a number, and the function itself."""

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        twice = torch.tanh(x)
        gates = [functional.silu(x) * y, y * functional.gelu(x)]
        square = torch.sin(x)
        return [*gates, twice * y + twice, torch.sigmoid(x) * y[:, :1], torch.cos(x) * 3.0, square * square]


def test_an_activation_takes_the_product_with_its_gate() -> None:
    x, y = torch.randn(5, SIZE), torch.randn(5, SIZE)
    exported = torch.export.export(Gates(), (x, y))
    make_exact(exported)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("specstep.exact_") for name in names) == 6
    assert sum(name.startswith("aten.mul") for name in names) == 4
    for got, expected in zip(exported.module()(x, y), Gates()(x, y), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_others_stay() -> None:
    names, _ = exact(Others(), torch.randn(2, SIZE))
    assert not any("exact" in name for name in names)


def test_a_row_alone_has_the_same_bits() -> None:
    module, x = Functions(), torch.randn(9, SIZE) * 4
    with torch.no_grad():
        together = exact(module, x)[1](x)
        alone = exact(module, x[4:5])[1](x[4:5])
    pairs = [pair for pair in zip(alone, together, strict=True) if len(pair[1]) == 9]  # the others add rows
    assert len(pairs) == 24 and all(torch.equal(one, all_rows[4:5]) for one, all_rows in pairs)

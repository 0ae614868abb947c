"""Products of complex numbers become those of their parts, whose bits do not depend on what is beside them."""

import pytest
import torch
from specstep.compile.inductor.complex_products import split_complex
from torch import Tensor, nn


class Rotation(nn.Module):
    """Turns x [B, H, T, 8] by the angles of T positions, as DeepSeek-V2 does."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].float() * torch.tensor([1.0, 0.3, 0.1, 0.03])
        factors = (torch.polar(torch.ones_like(angles), angles) * 1.3).to(x.device).unsqueeze(0).unsqueeze(-3)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * factors).flatten(3).type_as(x)


class Other(nn.Module):
    """Does more with complex numbers than is known."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x).conj() * 2)


def split(module: nn.Module, *inputs: Tensor) -> tuple[set[str], nn.Module]:
    exported = torch.export.export(module, inputs)
    split_complex(exported)
    return {str(node.target) for node in exported.graph.nodes}, exported.module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_mean_the_same_and_do_not_depend_on_their_company(dtype):
    x, positions = torch.randn(1, 3, 37, 8).to(dtype), torch.arange(37)
    names, graph = split(Rotation(), x, positions)
    assert not {"aten.polar.default", "aten.view_as_complex.default", "aten.view_as_real.default"} & names
    got = graph(x, positions)
    torch.testing.assert_close(got, Rotation()(x, positions), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for token in range(0, 37, 5):
        place = slice(token, token + 1)
        alone = split(Rotation(), x[:, :, place], positions[place])[1](x[:, :, place], positions[place])
        assert torch.equal(alone, got[:, :, place])


def test_what_is_not_known_stays():
    x = torch.randn(5, 2)
    names, graph = split(Other(), x)
    assert "aten.view_as_complex.default" in names and torch.equal(graph(x), Other()(x))

"""Linear layers that are written as weight @ x^T become linear layers; other products stay."""

import pytest
import torch
from specstep.compile.inductor.turned_layers import use_linear
from torch import Tensor, nn


class Product(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.randn(6, 4)), form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "turned":
            return self.weight @ x.transpose(1, 2)
        if self.form == "turned back":
            return self.weight @ x.transpose(-1, -2)
        if self.form == "as it is":
            return self.weight @ x
        return x.transpose(1, 2) @ self.weight


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "shape", "left"),
    [("turned", (2, 3, 4), 0), ("turned back", (2, 3, 4), 0), ("as it is", (2, 4, 3), 1), ("right", (2, 6, 3), 1)],
)
def test_a_weight_times_a_turned_x_is_a_linear_layer(form, shape, left):
    module, x = Product(form), torch.randn(shape)
    exported = torch.export.export(module, (x,), strict=False)
    use_linear(exported)
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.aten.matmul.default) == left
    assert targets.count(torch.ops.aten.linear.default) == 1 - left
    torch.testing.assert_close(exported.module()(x), module(x))

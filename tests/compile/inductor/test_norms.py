"""RMS norms of the tested architectures are found in exported graphs, and mean the same as one op."""

import inspect

import pytest
import torch
from models import ARCHITECTURES, tiny_model
from specstep.compile.inductor.norms import fuse_norms
from specstep.compile.inductor.rewrites import make_exact
from torch import Tensor, nn

NORM = "specstep.exact_rms_norm.default"


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_norm_of_an_architecture_is_one_op(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture).to(dtype)
    norms = {type(module): module for name, module in model.named_modules() if name.endswith("norm")}
    for kind, module in norms.items():
        if "Layer" in kind.__name__ or kind is nn.Identity:  # LayerNorm, and where one is left out
            continue
        if kind.__name__ == "Llama4TextL2Norm":  # without a weight: see `Plain` below
            continue
        if kind.__name__ == "KimiLinearRMSNormGated" and dtype != torch.float32:  # widens its weight: several ops
            continue
        generator = torch.Generator().manual_seed(0)
        weight = module.weight.detach()
        weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
        # Those of recurrent layers take a gate, too.
        names = [name for name in ("x", "gate") if name == "x" or name in inspect.signature(module.forward).parameters]
        given = tuple((torch.randn(2, 3, len(weight), generator=generator) * 3).to(dtype) for _ in names)
        program = torch.export.export(module, given)
        make_exact(program)
        program.validate()
        assert targets(program).count(NORM) == 1
        assert not {"aten.rsqrt.default", "aten.mean.dim", "aten.pow.Tensor_Scalar"} & set(targets(program)), kind
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.0}
        with torch.no_grad():
            torch.testing.assert_close(program.module()(*given), module(*given), **tolerance)


class Others(nn.Module):
    """What is no norm: another power, another dimension, a root that is used twice, a mean that is not kept."""

    def forward(self, x: Tensor) -> list[Tensor]:
        roots = [
            torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-5),
            torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5),
        ]
        shared = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return [*(x * root for root in roots), x * shared + shared, torch.rsqrt(x.pow(2).mean(-1) + 1e-5)]


def test_others_stay() -> None:
    x = torch.rand(4, 9, 9)
    program = torch.export.export(Others(), (x,))
    fuse_norms(program)
    assert NORM not in targets(program)
    for got, expected in zip(program.module()(x), Others()(x), strict=True):
        assert torch.equal(got, expected)


class Plain(nn.Module):
    """Norms without a weight, and one whose square is used elsewhere."""

    def forward(self, x: Tensor) -> list[Tensor]:
        square = x.pow(2)
        first = x * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)
        wide = x.float()
        return [first + square, (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)]


class Power(nn.Module):
    """As Gemma 4 writes it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5) ** -0.5


def test_a_root_that_is_written_as_a_power() -> None:
    x = torch.randn(4, 9, 37)
    program = torch.export.export(Power(), (x,))
    make_exact(program)
    assert targets(program) == [NORM]
    torch.testing.assert_close(program.module()(x), Power()(x), rtol=1e-6, atol=1e-6)


def test_norms_without_a_weight() -> None:
    x = torch.randn(4, 9, 37)
    program = torch.export.export(Plain(), (x,))
    fuse_norms(program)
    program.validate()
    assert targets(program).count(NORM) == 2 and "aten.pow.Tensor_Scalar" in targets(program)
    for got, expected in zip(program.module()(x), Plain()(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)

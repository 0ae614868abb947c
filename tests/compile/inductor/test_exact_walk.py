"""What a program still computes that may have other bits in other company is found and named."""

import pytest
import specstep
import torch
from models import ARCHITECTURES, save_model, tiny_model
from specstep.commands.describe import describe
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.inductor.exact_walk import left_over
from specstep.compile.inductor.packed_weights import pack_weights
from specstep.compile.inductor.rewrites import make_exact
from specstep.compile.source import Source
from specstep.kernels.expert_linear.op import expert_linear
from specstep.runtime.engine_file import read_manifest
from torch import Tensor, nn

REDUCTIONS = {
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "matmul": lambda x: x @ x.T,
    "mm": lambda x: torch.mm(x, x.T),
    "bmm": lambda x: torch.bmm(x[None], x.T[None]),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(-1),
    "var": lambda x: x.var(-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "index_add": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
    "mul": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1)[:44].reshape(22, 2)).mul(2j)),
    "atan": torch.atan,
    "erf": torch.erf,
    "pow": lambda x: x**0.3,
}
EXACT = {
    "products of elements": lambda x: (x * x + 1) / (x**2 + 2).sqrt() - x.clamp(-1, 1).where(x > 0, -x),
    "moves": lambda x: torch.cat([x, x.T[:5, :5].repeat(1, 2)[:, :9]]).flip(0)[torch.tensor([1, 2])],
    "choices": lambda x: x.topk(3).values + x.amax(-1, keepdim=True),
    "integers": lambda x: x.long().sum(-1) + (x > 0).cumsum(-1).sum(-1),
}


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Wrapped(nn.Module):
    """A function as the graph of a target has it."""

    def __init__(self, function):
        super().__init__()
        self.module = nn.Module()
        self.module.target = nn.Module()
        self.module.target.layer = Layer(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.module.target.layer(x)


def found(function) -> list[str]:
    return left_over([torch.export.export(Wrapped(function), (torch.rand(5, 9),))])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_products_and_reductions_are_found(name):
    assert [line.partition(" in ")[0].removesuffix("_") for line in found(REDUCTIONS[name])] == [f"aten.{name}"]
    assert found(REDUCTIONS[name])[0].endswith(" in layer (1)")


@pytest.mark.parametrize("name", EXACT)
def test_what_has_one_result_is_not(name):
    assert found(EXACT[name]) == []


def test_a_power_that_is_a_root_becomes_one():
    """The compiler writes x ** -0.5 as a power, which vectors compute in another way."""
    exported = torch.export.export(Wrapped(lambda x: (x + 1) ** -0.5), (torch.rand(5, 9),))
    assert left_over([exported]) == ["aten.pow in layer (1)"]
    make_exact(exported)
    assert left_over([exported]) == []


def test_experts_that_were_not_packed_are_found():
    experts = torch.tensor([0, 1, 1, 0, 1])
    weight = torch.rand(2, 3, 9)
    assert found(lambda x: expert_linear(x, weight, experts, False)) == ["specstep.expert_linear in layer (1)"]


def test_graphs_inside_of_an_op_are_found():
    """Which are not walked."""

    def inner(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x + 1

    assert found(inner) == ["higher_order.wrap_with_autocast in layer (1)"]


def after_rewrites(architecture: str, dtype: str) -> list[str]:
    model = tiny_model(architecture).to(getattr(torch, dtype))
    config = make_config({"drafter": "ngram", "dtype": dtype, "max_seq_len": 128})
    graphs = assemble(Source(architecture, model, None), config)
    programs = [export_program(program, graphs.spec) for program in (graphs.prefill, graphs.step)]
    for program in programs:
        make_exact(program)
    pack_weights(programs)
    return left_over(programs)


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "DeepseekV3" else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_nothing_is_left_of_our_architectures(architecture):
    assert after_rewrites(architecture, "bfloat16") == []


@pytest.mark.slow
def test_an_engine_says_what_is_left(tmp_path):
    model, lines = str(save_model(tmp_path / "model", "Llama")), []
    specstep.build(
        model, str(tmp_path / "engine"), drafter="none", dtype="float16", max_seq_len=64, progress=lines.append
    )
    said = describe(read_manifest(tmp_path / "engine"))
    assert any(line.startswith("warning: drafts may change a text: aten.linear in ") for line in lines)
    assert "drafts      may change the text: aten.linear in " in said

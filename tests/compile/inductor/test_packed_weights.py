"""Packed weights in exported programs: which layers, joined when, held once, and the same numbers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from specstep.compile.config import make_config
from specstep.compile.inductor.packed_weights import pack_weights
from specstep.compile.precision import choose_precision
from specstep.kernels.expert_linear.op import expert_linear
from specstep.kernels.linear.packing import pack
from specstep.kernels.native import build_library, c_shims
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

PACKED, PLAIN = "specstep.packed_linear.default", "aten.linear.default"


class Network(nn.Module):
    """Two layers of one x and one behind them, a tied head, an embedding of its own, and a weight that is computed."""

    def __init__(self, biased: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 36), nn.Embedding(64, 36)
        self.first, self.second = nn.Linear(36, 48, biased), nn.Linear(36, 41, biased)
        self.down = nn.Linear(41, 36, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(ids)
        x = x + self.down(self.first(x)[..., :41] * self.second(x))
        head = torch.nn.functional.linear(x, self.tokens.weight)
        return head + torch.nn.functional.linear(x, self.tokens.weight[:50] * 2)


class Second(nn.Module):
    """Reads one of the two layers that the network joins."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        return self.network.second(self.network.places(ids))


class Mixture(Network):
    """The same, then a linear layer of each token's own expert."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.experts = nn.Parameter(torch.randn(3, 50, 19) if transposed else torch.randn(3, 19, 50))

    def forward(self, ids: Tensor) -> Tensor:
        return expert_linear(super().forward(ids)[0], self.experts, ids[0] % 3, self.transposed)


def exported(module: nn.Module) -> ExportedProgram:
    shapes = ({1: Dim("T", min=2, max=64)},)
    return torch.export.export(module, (torch.zeros(1, 8, dtype=torch.int64),), dynamic_shapes=shapes)


def calls(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def ids(count: int) -> Tensor:
    return torch.randint(0, 50, (1, count), generator=torch.Generator().manual_seed(count))


def same(program: ExportedProgram, module: nn.Module, **tolerances: float) -> None:
    program.validate()
    for count in (2, 9, 40):
        with torch.no_grad():
            torch.testing.assert_close(program.module()(ids(count)), module(ids(count)), **tolerances)


class Routed(Network):
    """The same in bfloat16, with a router: an output for each of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(50, 3, bias=False), nn.Parameter(torch.randn(3, 19, 50))

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)[0]
        return expert_linear(x, self.experts, self.router(x).argmax(-1), False)


def test_a_router_keeps_its_dtype_where_others_are_quantised() -> None:
    program = exported(Routed().bfloat16())
    packed = pack_weights([program], choose_precision(make_config({"weights": "int8"}), [], 50, set()))
    kinds = {weight.name.removesuffix("_packed"): weight.kind for weight in packed}
    assert kinds["router.weight"] == "bfloat16"
    others = {name for name in kinds if "weight" in name or name == "experts"} - {"router.weight"}
    assert others and all(kinds[name] == "int8" for name in others)
    assert calls(program).count("specstep.packed_embedding.default") == 2  # the tied one, and the one alone


class Columns(nn.Module):
    """A layer with its weight [K, N], as GPT-2 has it, and one whose bias is computed, which stays."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 36)
        self.weight, self.bias = nn.Parameter(torch.randn(36, 41)), nn.Parameter(torch.randn(41))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)[0]
        return torch.addmm(self.bias, x, self.weight) + torch.addmm(self.bias * 2, x, self.weight)


def test_weights_by_columns_are_packed_too() -> None:
    module = Columns().eval()
    program = exported(module)
    pack_weights([program])
    assert calls(program).count(PACKED) == calls(program).count("aten.addmm.default") == 1
    same(program, module, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", (True, False))
def test_layers_of_one_x_are_one_product(biased: bool) -> None:
    network = Network(biased).eval()
    program = exported(network)
    pack_weights([program])
    ops = calls(program)
    assert ops.count(PACKED) == 3 and ops.count(PLAIN) == 1  # the joined two, down, head; the computed weight
    held = program.state_dict
    joined = pack(torch.cat([network.first.weight, network.second.weight]).detach())
    assert torch.equal(held["first.weight_packed"], joined)
    assert ("first.bias_packed" in held) == biased
    assert not {"first.weight", "first.bias", "second.weight", "second.bias", "down.weight"} & held.keys()
    same(program, network)


def test_a_tied_embedding_reads_the_packed_weight() -> None:
    network = Network().eval()
    program = exported(network)
    pack_weights([program])
    ops = calls(program)
    assert ops.count("specstep.packed_embedding.default") == 1 and ops.count("aten.embedding.default") == 1
    assert {"tokens.weight_packed", "places.weight"} <= program.state_dict.keys()
    assert "tokens.weight" in program.state_dict  # the computed weight is made from it
    assert "places.weight_packed" not in program.state_dict


def test_programs_share_what_is_packed() -> None:
    network = Network().eval()
    programs = [exported(network), exported(network)]
    pack_weights(programs)
    first, second = ({k: v.data_ptr() for k, v in p.state_dict.items()} for p in programs)
    assert first == second and "first.weight_packed" in first


def test_layers_are_joined_where_every_program_joins_them() -> None:
    network = Network().eval()
    programs = [exported(network), exported(Second(network))]
    pack_weights(programs)
    assert calls(programs[0]).count(PACKED) == 4 and calls(programs[1]).count(PACKED) == 1
    held = [program.state_dict for program in programs]
    assert held[0]["second.weight_packed"].data_ptr() == held[1]["second.weight_packed"].data_ptr()
    for program, module in zip(programs, (network, Second(network)), strict=True):
        same(program, module)


class Rows(nn.Module):
    """Layers of one x that cannot all be joined: outputs that are no whole panels, and biases for some."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((17, True), (16, True), (5, True), (16, False), (3, False))
        self.layers = nn.ModuleList(nn.Linear(50, columns, bias) for columns, bias in sizes)

    def forward(self, x: Tensor) -> Tensor:
        one_hot = torch.nn.functional.one_hot(x, 50).float()
        return torch.cat([layer(one_hot) for layer in self.layers], -1)


def test_only_whole_panels_are_joined() -> None:
    rows = Rows().eval()
    program = exported(rows)
    pack_weights([program])
    widths = [node.args[3] for node in program.graph.nodes if str(node.target) == PACKED]
    assert widths == [17, 21, 19]
    same(program, rows)


def test_other_dtypes_stay() -> None:
    program = exported(Network().half().eval())
    before = calls(program)
    pack_weights([program])
    assert calls(program) == before


@pytest.mark.parametrize("transposed", (True, False))
def test_experts_are_packed(transposed: bool) -> None:
    mixture = Mixture(transposed).eval()
    program = exported(mixture)
    pack_weights([program])
    assert calls(program).count("specstep.packed_expert_linear.default") == 1
    assert "experts" not in program.state_dict and program.state_dict["experts_packed"].shape == (3, 2, 50, 16)
    same(program, mixture, rtol=1e-4, atol=1e-4)


RUN_PACKAGE = """
import ctypes, sys, torch
library, package, data = sys.argv[1:]
ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
model = torch._inductor.aoti_load_package(package)
inputs, expected = torch.load(data)
for value, wanted in zip(inputs, expected):
    assert torch.equal(model(value), wanted)
assert not any(name.startswith("specstep") for name in sys.modules)
"""


def compiled(program: ExportedProgram, folder: Path) -> tuple[str, Any]:
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        inductor_configs={"aot_inductor.custom_ops_to_c_shims": c_shims()},
    )
    return package, torch._inductor.aoti_load_package(package)


def test_compiled_package_runs_without_python_operators(tmp_path: Path) -> None:
    program = exported(Mixture(False).bfloat16().eval())
    pack_weights([program])
    package, model = compiled(program, tmp_path)
    inputs = [ids(count) for count in (2, 8, 33)]
    expected = [model(value) for value in inputs]
    for value, result in zip(inputs, expected, strict=True):
        wanted = program.module()(value).float()  # rounded after each operation, where compiled code rounds less often
        assert (result.float() - wanted).norm() < 0.03 * wanted.norm()
    torch.save((inputs, expected), tmp_path / "data.pt")
    # The library moves with the engine: another folder, another process, nothing of ours imported.
    library = tmp_path / "engine" / "renamed.so"
    library.parent.mkdir()
    library.write_bytes(build_library().read_bytes())
    command = [sys.executable, "-c", RUN_PACKAGE, str(library), package, str(tmp_path / "data.pt")]
    subprocess.run(command, check=True, cwd=tmp_path)


class Layers(nn.Module):
    """Linear layers with no other arithmetic between them than what is rounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 96)
        self.up, self.gate = nn.Linear(96, 160), nn.Linear(96, 160)
        self.down = nn.Linear(160, 96, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return torch.nn.functional.linear(self.down(torch.relu(self.up(x)) * self.gate(x)), self.tokens.weight)


def test_compiled_layers_give_a_token_the_same_bits_in_any_company(tmp_path: Path) -> None:
    program = exported(Layers().bfloat16().eval())
    pack_weights([program])
    _, model = compiled(program, tmp_path)
    whole = model(ids(64))
    for count in range(2, 64):
        assert torch.equal(model(ids(64)[:, :count]), whole[:, :count]), count


class Router(nn.Module):
    """Routers as models write them: the weight is widened in each step, with the bias or without."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.biased = nn.Linear(36, 5, bias=False), nn.Linear(36, 7)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.type(torch.float32)
        first = torch.nn.functional.linear(wide, self.gate.weight.type(torch.float32))
        second = torch.nn.functional.linear(wide, self.biased.weight.float(), self.biased.bias.float())
        return torch.cat([first, second], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_widened_is_packed_as_it_is_multiplied(dtype: torch.dtype) -> None:
    module, x = Router().to(dtype), torch.randn(4, 36).to(dtype)
    program = torch.export.export(module, (x,))
    assert calls(program).count(PLAIN) == 2
    packed = pack_weights([program])
    assert calls(program).count(PACKED) == 2 and PLAIN not in calls(program)
    assert [weight.kind for weight in packed] == ["float32"] * 2
    assert not {"gate.weight", "biased.weight"} & program.state_dict.keys()  # nothing is held twice
    program.validate()
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-5, atol=1e-5)

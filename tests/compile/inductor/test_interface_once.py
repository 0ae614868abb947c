"""The C interface of programs is compiled once; what a program says of itself is what PyTorch's own code would say."""

import zipfile

import pytest
import torch
from specstep.compile.inductor import layer_code, programs
from specstep.compile.inductor.interface_once import INTERFACE, OBJECT, without_interface
from specstep.compile.inductor.programs import compile_programs
from specstep.user_cache import PROGRAMS, cache_path
from torch import Tensor, nn


class Holding(nn.Module):
    """Constants of several kinds: one without dimensions, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4).t())
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("ids", torch.arange(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight * self.scale, y + self.ids


class Empty(nn.Module):
    """No constants at all."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, y * 2


GIVEN = torch.randn(2, 4), torch.randn(2, 3)


@pytest.fixture
def nothing_kept(monkeypatch):
    """Each program is compiled."""
    monkeypatch.setattr(programs, "find_program", lambda key, path: False)
    monkeypatch.setattr(programs, "keep_program", lambda key, path: None)


def code_of(path):
    with zipfile.ZipFile(path) as package:
        return next(package.read(file).decode() for file in package.namelist() if file.endswith(".wrapper.cpp"))


@pytest.mark.parametrize("module", [Holding, Empty])
@pytest.mark.usefixtures("nothing_kept")
def test_programs_say_and_compute_the_same(module, tmp_path, monkeypatch):
    def package(name):
        with torch.no_grad():
            program = torch.export.export(module(), GIVEN)
        compile_programs({name: program}, tmp_path, "cpu")
        path, held = tmp_path / f"{name}.pt2", {**program.state_dict, **program.constants}
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
        names = loader.get_constant_fqns()
        loader.load_constants({name: held[name] for name in names}, False, False, True)
        return code_of(path), sorted(names), loader.get_call_spec(), loader.run(list(GIVEN))

    own, *said, results = package("own")
    monkeypatch.setattr(layer_code, "without_interface", lambda wrapper: None)
    whole, *expected, expected_results = package("whole")
    assert said == expected and len(said[0]) == {Holding: 3, Empty: 0}[module]
    assert all(map(torch.equal, results, expected_results)) and len(results) == 2
    assert INTERFACE.read_text().strip() in whole and INTERFACE.read_text().strip() not in own
    assert "constants_info_[" not in own


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A wrapper as PyTorch makes it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(programs, "find_program", lambda key, path: False)
        patch.setattr(layer_code, "without_interface", lambda wrapper: None)
        compile_programs({"whole": torch.export.export(Holding(), GIVEN)}, folder, "cpu")
    return code_of(folder / "whole.pt2")


@pytest.mark.parametrize(
    ("known", "unknown"),
    [
        ("constants_info_[1].offset = 0;", "constants_info_[1].offset = sizeof(int);"),
        ("constants_info_[1].from_folded = false;", "constants_info_[1].opaque_metadata = {1};"),
        ("    update_constants_array", "    something_new();\n    update_constants_array"),
        ("std::move(cubin_dir),", "std::move(cubin_dir), 7,"),
        ("static thread_local std::string g_aoti_last_error;", "static std::string g_aoti_last_error;"),
        ("    out_spec_ = ", "    out_spec_ = prefix + "),
    ],
)
def test_a_form_that_is_not_known_stays_as_it_is(whole, known, unknown):
    assert without_interface(whole) is not None
    assert whole.count(known) == 1 or known.startswith(("std::move", "static"))
    assert without_interface(whole.replace(known, unknown)) is None


@pytest.mark.usefixtures("nothing_kept", "own_cache")
def test_the_object_is_compiled_once(tmp_path):
    """By two programs that are compiled at the same time, too, and again where the kept one is damaged."""
    for file in cache_path(PROGRAMS).glob(f"*.{OBJECT}"):
        file.unlink()

    def compile_both():
        with torch.no_grad():
            both = {name: torch.export.export(module(), GIVEN) for name, module in (("a", Holding), ("b", Empty))}
        compile_programs(both, tmp_path, "cpu")
        (kept,) = cache_path(PROGRAMS).glob(f"*.{OBJECT}")
        return kept, kept.stat().st_ino

    kept, written = compile_both()
    assert compile_both() == (kept, written)
    damaged = kept.read_bytes()[:-1]
    kept.write_bytes(damaged)
    assert compile_both()[0] == kept and kept.read_bytes() != damaged
    torch._inductor.aoti_load_package(str(tmp_path / "b.pt2"))(*GIVEN)

"""Compiled code from the user's cache: for other weights the same, for whatever the compiler saw another."""

import hashlib
import os
import subprocess
import sys

import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from specstep.compile.inductor import kept_code, lower, programs
from specstep.compile.inductor.kept_code import find_program, keep_program, program_key
from specstep.errors import BuildError
from specstep.kernels.linear.groups import pack_groups
from specstep.kernels.linear.quantize import quantize_int8
from specstep.kernels.native import load_library
from specstep.user_cache import PROGRAMS, cache_path
from torch import Tensor, nn

SETTINGS = {"always_keep_tensor_constants": True}
ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}


pytestmark = pytest.mark.usefixtures("own_cache")


class Network(nn.Module):
    """A layer, a norm's weight, a table and a head that may be the embedding."""

    def __init__(self, seed: int, tied: bool = False, norm: float | None = None, table: int = 3):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.head = nn.Embedding(16, 12), nn.Linear(12, 16, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.norm = nn.Parameter(torch.randn(12) if norm is None else torch.full((12,), norm))
        self.register_buffer("table", torch.tensor([table, 1, 2]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids + self.table) * (1 + self.norm))


def key(*arguments, settings=SETTINGS, **changes):
    with torch.no_grad():
        exported = torch.export.export(Network(*arguments, **changes), (torch.tensor([4, 5, 6]),))
    return program_key(exported, settings)


def test_other_weights_have_the_key_of_the_first():
    assert key(0) == key(1)
    assert key(0, tied=True) == key(1, tied=True)


def test_what_the_compiler_saw_is_in_the_key(monkeypatch):
    """Tied weights are one constant to it; tables, and what holds one number everywhere, may be folded."""
    keys = [
        key(0), key(0, tied=True), key(0, norm=1.0), key(0, norm=0.5), key(0, table=4),
        key(0, settings=SETTINGS | {"size_asserts": False}),
    ]  # fmt: skip
    monkeypatch.setattr(kept_code, "_compiler", lambda: "another")
    keys.append(key(0))
    assert len(set(keys)) == len(keys)


def test_what_our_ops_take_alone_is_not_seen():
    """Packed weights are integers, as tables are."""
    load_library()

    class Packed(nn.Module):
        def __init__(self, seed, table):
            super().__init__()
            weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
            self.register_buffer("weight", pack_groups(quantize_int8(weight)))
            self.register_buffer("table", torch.tensor([table]))

        def forward(self, x):
            return torch.ops.specstep.packed_linear(x, self.weight, None, 32) + self.table

    def of(*values):
        return program_key(torch.export.export(Packed(*values), (torch.zeros(2, 32).bfloat16(),)), SETTINGS)

    assert of(0, 3) == of(1, 3) != of(0, 4)


def test_another_process_has_the_same_key():
    """Also of functions that are no operators, which a step calls with sizes."""
    program = (
        "import torch; from specstep.compile.inductor.kept_code import program_key\n"
        "class N(torch.nn.Module):\n    def forward(self, x): return x * torch.sym_min(x.shape[0], 3)\n"
        "sizes = ({0: torch.export.Dim('n', min=2, max=9)},)\n"
        "found = program_key(torch.export.export(N(), (torch.zeros(4),), dynamic_shapes=sizes), {'a': True})"
    )
    exec(program, here := {})
    there = subprocess.run([sys.executable, "-c", f"{program}\nprint(found)"], stdout=subprocess.PIPE, check=True)
    assert there.stdout.decode().strip() == here["found"]


def test_settings_of_the_compiler_that_nobody_gave_count():
    plain = key(0)
    with torch._inductor.config.patch("epilogue_fusion", not torch._inductor.config.epilogue_fusion):
        assert key(0) != plain


def test_what_the_compiler_writes_into_its_settings_does_not_count():
    plain = key(0)
    with torch._inductor.config.patch("aot_inductor.metadata", {"AOTI_PLATFORM": "linux"}):
        assert key(0) == plain


def test_a_program_comes_back_whole_or_not_at_all(tmp_path):
    name, path = "a" * 64, tmp_path / "step.pt2"
    assert not find_program(name, path) and not path.exists()
    path.write_bytes(b"compiled" * 100)
    keep_program(name, path)
    path.unlink()
    assert find_program(name, path) and path.read_bytes() == b"compiled" * 100
    kept = cache_path(PROGRAMS, f"{name}.pt2")
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole[:40] + b"!" + whole[41:], hashlib.sha256(b"x").digest()):
        kept.write_bytes(damaged)
        assert not find_program(name, path)


def test_those_that_nobody_used_for_longest_go(tmp_path, monkeypatch):
    path = tmp_path / "step.pt2"
    path.write_bytes(bytes(1000))
    monkeypatch.setattr(kept_code, "MOST_BYTES", 3200)
    for number in range(3):
        keep_program(str(number), path)
        os.utime(cache_path(PROGRAMS, f"{number}.pt2"), (number + 1, number + 1))
    assert find_program("0", path)  # used again
    keep_program("3", path)
    assert [find_program(str(number), path) for number in range(4)] == [True, False, True, True]


@pytest.mark.slow
def test_a_fine_tune_is_built_without_a_trace_and_a_compiler(engine_folder, shared_folder, tmp_path, monkeypatch):
    """It is what `engine_folder` was built from, with other weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_folder / "cache"))
    started = []

    def note(functions):
        started.extend(functions)
        if functions:
            raise BuildError("a compiler is started")

    monkeypatch.setattr(programs, "run_at_once", note)
    folder = save_model(tmp_path / "model", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(lower, "_programs", None)  # what traces and compiles
        built = specstep.build(str(folder), tmp_path / "engine", **ENGINE)
    with specstep.load(built) as engine:
        expected = greedy(tiny_model("Llama", 1), [5, 6, 7], 24)
        assert engine.generate([5, 6, 7], 24, ignore_eos=True).token_ids == expected
    assert not started
    monkeypatch.setattr(kept_code, "_compiler", lambda: "another")
    with pytest.raises(BuildError, match="a compiler is started"):
        specstep.build(str(folder), tmp_path / "other", **ENGINE)
    assert set(started) == {"prefill", "step", "plain"}


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "step.pt2"
    path.write_bytes(b"compiled")
    keep_program("a", path)
    assert not find_program("a", path)

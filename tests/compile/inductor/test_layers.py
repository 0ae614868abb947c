"""Layers that are alike are compiled once: the same bits as without, whatever a layer has of its own."""

import re
import zipfile

import pytest
import torch
from specstep.compile.inductor import layers as layers_module
from specstep.compile.inductor import programs
from specstep.compile.inductor.layer_loops import join_calls
from specstep.compile.inductor.layers import LEAST, outline_layers
from specstep.compile.inductor.programs import compile_programs
from torch import Tensor, nn
from torch.export import Dim


class Layer(nn.Module):
    """Writes what it sees to its cache, and reads all of that."""

    def __init__(self, size: int, window: int, doubled: bool):
        super().__init__()
        self.norm, self.linear, self.window, self.doubled = nn.LayerNorm(size), nn.Linear(size, size), window, doubled

    def forward(self, x: Tensor, place: Tensor, cache: Tensor) -> Tensor:
        cache.index_copy_(1, place, self.linear(self.norm(x)))
        seen = (cache * (torch.arange(cache.shape[1]) < self.window)[:, None]).amax(1, keepdim=True)
        return x + seen * (2 if self.doubled else 1)


class Network(nn.Module):
    """Layers of two windows; `odd` differs in code alone, and `read` also goes elsewhere."""

    def __init__(self, windows: list[int], odd: int | None = None, read: int | None = None, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Layer(32, window, index == odd) for index, window in enumerate(windows))
        self.read = read

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        other = x
        for index, layer in enumerate(self.layers):
            x = layer(x, place, caches[index])
            other = x if index == self.read else other
        return x.sin(), other.cos()


def inputs(network: Network, rows: int = 2, tokens: int = 3, slots: int = 8) -> tuple:
    generator = torch.Generator().manual_seed(rows + tokens)
    x = torch.randn(rows, tokens, 32, generator=generator)
    return x, torch.arange(tokens) + 1, [torch.zeros(rows, slots, 32) for _ in network.layers]


def exported(network: Network, **sizes: int):
    given = inputs(network, **sizes)
    shapes = (
        {0: Dim("rows", max=8), 1: Dim("tokens", max=8)},
        {0: Dim("tokens", max=8)},
        [{0: Dim("rows", max=8)}] * len(given[2]),
    )
    with torch.no_grad():
        return torch.export.export(network, given, dynamic_shapes=shapes, strict=False)


CASES = {
    "alike": (Network([8] * 4), [4]),
    "two kinds": (Network([8, 8, 4] * 3), [6, 3]),
    "an odd one": (Network([8] * 5, odd=2), [4]),
    "read elsewhere": (Network([8] * 5, read=1), [5]),
    "too few": (Network([8] * (LEAST - 1)), []),
}


class TwoPasses(Network):
    """Two passes of other sizes over the same caches, as of a drafter that catches up and goes on."""

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        first, _ = super().forward(x, place, caches)
        x = first
        for _ in range(2):
            x, _ = super().forward(x.amax(1, keepdim=True), place.amax(0, keepdim=True), caches)
        return x, first


def test_a_cache_that_is_written_elsewhere():
    """A write of a few layers that are no op, and calls of one, on a cache with free slots between its rows."""
    network = TwoPasses([8] * (LEAST - 1))
    assert outline_layers(exported(network), lambda kind: True) == []
    assert len(outline_layers(exported(TwoPasses([8] * LEAST)), lambda kind: True)) == 2
    answers = iter([False, True])  # the layers of a kind that is not taken stay what they were
    assert outline_layers(exported(TwoPasses([8] * LEAST)), lambda kind: next(answers)) == []


@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_kind_are_one_op(name):
    network, expected = CASES[name]
    program = exported(network)
    kinds = outline_layers(program, lambda kind: True)
    calls = [len(program.graph.find_nodes(op="call_function", target=kind.overload)) for kind in kinds]
    assert sorted(calls, reverse=True) == expected
    linear = len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))
    assert linear == len(network.layers) - sum(expected)
    for kind in kinds:
        aliases = [argument.alias_info for argument in kind.overload._schema.arguments]
        assert sum(alias is not None and alias.is_write for alias in aliases) == 1  # its cache


def test_what_cannot_be_a_function_stays_as_it_is():
    network, _ = CASES["alike"]
    program = exported(network)
    before = str(program.graph)
    assert outline_layers(program, lambda kind: False) == []
    assert str(program.graph).count("linear") == before.count("linear")


class Pair(Layer):
    """Has two results."""

    def forward(self, x: Tensor, place: Tensor, cache: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x, place, cache)
        return x, other + x.amax(-1, keepdim=True)


class Pairs(Network):
    """Each layer is given both results of the one before; swapped: from the third on in turn."""

    def __init__(self, swapped: bool = False):
        super().__init__([8] * 5)
        self.layers, self.swapped = nn.ModuleList(Pair(32, 8, False) for _ in range(5)), swapped

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        other = x.cos()
        for index, layer in enumerate(self.layers):
            x, other = (other, x) if self.swapped and index > 2 else (x, other)
            x, other = layer(x, place, caches[index], other)
        return x.sin(), other.cos()


class Writer(Layer):
    """Has no result."""

    def forward(self, x: Tensor, place: Tensor, cache: Tensor) -> None:
        cache.index_copy_(1, place, self.linear(self.norm(x)))


class Writers(Network):
    """Layers that write what all of them are given to their caches."""

    def __init__(self) -> None:
        super().__init__([8] * 4)
        self.layers = nn.ModuleList(Writer(32, 8, False) for _ in range(4))

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        for layer, cache in zip(self.layers, caches, strict=True):
            layer(x, place, cache)
        return x.sin(), x.cos()


class Between(Network):
    """Does something between the third and the fourth of five layers."""

    def __init__(self, act):
        super().__init__([8] * 5)
        self.act = act

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        other = x
        for index, layer in enumerate(self.layers):
            x = layer(x, place, caches[index])
            other = self.act(place, caches) if index == 2 else other
        return x.sin(), other.cos()


class OneCache(Network):
    """All layers write to one cache."""

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(x, place, [caches[0]] * len(caches))


class Places(Network):
    """`made`, of a layer's number, gives the place that it writes to."""

    def __init__(self, made):
        super().__init__([8] * 5)
        self.made = made

    def forward(self, x: Tensor, place: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        places = [place, place.flip(0)]
        for index, layer in enumerate(self.layers):
            x = layer(x, self.made(places, index), caches[index])
        return x.sin(), x.cos()


def appended(to):
    """Adds to a tensor in place, by an op of ours."""
    return lambda place, caches: torch.ops.specstep.append(caches[4].new_ones(2, 1, 32), to(place, caches))


NETWORKS = {name: network for name, (network, _) in CASES.items()} | {
    "two results": Pairs(),
    "results in turn": Pairs(swapped=True),
    "no result": Writers(),
    "one cache": OneCache([8] * 4),
    "a cache read between": Between(lambda place, caches: caches[4].amax(1, keepdim=True)),
    "a cache written between": Between(appended(lambda place, caches: caches[4])),
    "what all read written between": Between(appended(lambda place, caches: place)),
    "another of two for all": Places(lambda places, index: places[index > 2]),
    "one of two for each": Places(lambda places, index: places[index % 2]),
    "made for each": Places(lambda places, index: places[0] + index),
}
LOOPS = {
    "alike": [4],
    "two kinds": [2, 2, 2],  # and three layers of the other kind between them, alone
    "an odd one": [2, 2],
    "read elsewhere": [2, 3],
    "two results": [5],
    "results in turn": [3, 2],
    "no result": [4],
    "one cache": [],
    "a cache read between": [4],  # the fifth layer writes to it
    "a cache written between": [4],
    "what all read written between": [3, 2],
    "another of two for all": [3, 2],
    "one of two for each": [5],
    "made for each": [],
}


@pytest.fixture(scope="module")
def append():
    """An op of ours that writes, so that layers are taken beside it."""
    library = torch.library.Library("specstep", "FRAGMENT")
    library.define("append(Tensor x, Tensor(a!) cache) -> Tensor")
    torch.library.register_fake("specstep::append", lambda x, cache: torch.empty_like(x), lib=library)
    library.impl("append", lambda x, cache: cache.add_(1) and x.clone(), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("name", LOOPS)
def test_layers_that_follow_one_another_are_a_loop(name, append):
    program = exported(NETWORKS[name])
    loops = join_calls(program.graph, outline_layers(program, lambda kind: True))
    counts = []
    for loop in loops:
        for call in program.graph.find_nodes(op="call_function", target=loop.overload):
            own = {len(call.args[place]) for place in loop.own}
            assert len(own) == 1 and len(loop.carried) == loop.kind.outputs
            counts += own
    assert counts == LOOPS[name]
    program.graph.lint()
    expected = [argument.alias_info for loop in loops for argument in loop.overload._schema.arguments]
    assert sum(alias is not None and alias.is_write for alias in expected) == len(loops)  # lists of caches


def test_two_calls_on_one_row():
    """What a loop returns for layers of other sizes than those that it was made of."""
    program = exported(NETWORKS["alike"])
    (loop,) = join_calls(program.graph, outline_layers(program, lambda kind: True))
    (call,) = program.graph.find_nodes(op="call_function", target=loop.overload)
    given = [
        [torch.empty(7, 8, 32, device="meta")] * 2 if isinstance(x, list) else torch.empty(7, 5, 32, device="meta")
        for x in call.args
    ]
    assert loop.overload(*given).shape == (7, 5, 32)


def test_a_program_calls_a_loop_over_its_layers(engine_folder):
    """Once, with a list of each of their weights. What all of them read, as cosines of positions, is computed before,
    once; Inductor would compute it for each layer."""
    for name in ("step", "plain"):
        with zipfile.ZipFile(engine_folder / f"{name}.pt2") as package:
            file = next(file for file in package.namelist() if file.endswith(".wrapper.cpp"))
            calls = re.findall(r"CHECK\(aoti_torch_cpu_layer_\w+\((.*)\)\);", package.read(file).decode())
        (call,) = calls
        own, shared = re.findall(r"std::array<AtenTensorHandle, 3>{[^}]*}", call), re.sub(r"std::array<.*?}", "", call)
        assert len(own) > 3 and not any("buf" in each for each in own)
        assert len(re.findall(r"(?<!&)\bbuf\d+\b", shared)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two kinds", "read elsewhere", "two results", "no result"])
def test_compiled_code_computes_the_same_bits(name, tmp_path, monkeypatch):
    """Beside the same program with every layer compiled on its own; caches, and sizes of other inputs, too."""
    network = NETWORKS[name]
    monkeypatch.setattr(programs, "find_program", lambda key, path: False)  # nothing from the cache
    monkeypatch.setattr(programs, "keep_program", lambda key, path: None)
    program = exported(network)
    compile_programs({"once": program}, tmp_path, "cpu")
    monkeypatch.setattr(layers_module, "LEAST", 100)
    compile_programs({"each": exported(network)}, tmp_path, "cpu")
    runs = [torch._inductor.aoti_load_package(str(tmp_path / f"{name}.pt2")) for name in ("once", "each")]
    values = {**program.state_dict, **program.constants}  # packed
    for sizes in ({}, {"rows": 1, "tokens": 1}, {"rows": 5, "tokens": 7}):
        results = []
        for run in runs:
            given = inputs(network, **sizes)
            run.load_constants({name: values[name] for name in run.get_constant_fqns()}, check_full_update=True)
            results.append([*run(*given), *given[2]])
        for once, each in zip(*results, strict=True):
            assert torch.equal(once, each)
        with torch.no_grad():
            given = inputs(network, **sizes)
            torch.testing.assert_close([*network(*given), *given[2]], results[0])

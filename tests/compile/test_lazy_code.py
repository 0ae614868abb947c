"""Graphs become code where they run: the same results, and the same module afterwards."""

import torch
from specstep.compile.lazy_code import code_written_when_run
from torch.fx import GraphModule, symbolic_trace


class Doubles(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def change(module):
    """Have it triple."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.args = (node.args[0], 3)
    module.recompile()


def test_a_changed_graph_runs_as_it_is():
    recompile, x = GraphModule.recompile, torch.ones(2)
    with code_written_when_run():
        inside, outside = symbolic_trace(Doubles()), symbolic_trace(Doubles())
        assert not hasattr(inside, "_code") and not hasattr(outside, "_code")
        assert torch.equal(inside(x), x * 2)
        change(inside)
        assert not hasattr(inside, "_code")
        assert torch.equal(inside(x), x * 3)
        change(outside)
    assert GraphModule.recompile is recompile
    assert torch.equal(outside(x), x * 3) and "3" in outside.code
    change(outside)
    assert torch.equal(outside(x), x * 3)


def test_an_exported_module_has_its_structure():
    """Of arguments and results, which comes with the graph."""

    class Module(torch.nn.Module):
        def forward(self, first: torch.Tensor, others: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"sum": first + others[0], "difference": first - others[1]}

    given = torch.tensor(5.0), [torch.tensor(2.0), torch.tensor(1.0)]
    with code_written_when_run():
        exported = torch.export.export(Module(), given, strict=False)
    results = exported.module()(*given)
    assert {name: value.item() for name, value in results.items()} == {"sum": 7.0, "difference": 4.0}
    assert "sub" in exported.graph_module.print_readable(print_output=False)

"""A kind of layer is traced once: the graph is that of a trace of every layer, whatever the layers are."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from models import tiny_model
from specstep.compile.assemble import Assembled, assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.source import Source
from specstep.compile.traced_once.once import layers_traced_once
from torch import Tensor, nn
from torch.export import ExportedProgram

LAYERS_ONCE = "specstep.compile.export.layers_traced_once"
SIX = {"num_hidden_layers": 6}


def recurrent(kind: str) -> dict[str, Any]:
    return {"num_hidden_layers": 6, "layer_types": [*[kind] * 5, "full_attention"]}


def assembled(model: Any, **options: Any) -> Assembled:
    given = {"drafter": "none", "dtype": "float32", "max_batch": 2, "max_seq_len": 128} | options
    return assemble(Source("tiny", model, None), make_config(given))


def traced(graphs: Assembled, name: str) -> tuple[ExportedProgram, int]:
    """A program, and how many layers were repeated in it."""
    seen = []

    @contextlib.contextmanager
    def watched(program: nn.Module) -> Iterator[Any]:
        with layers_traced_once(program) as once:
            yield once
        seen.append(len(once.repeated))

    with patch(LAYERS_ONCE, watched):
        program = export_program(graphs.programs[name], graphs.spec)
    return program, sum(seen)


def traced_in_full(graphs: Assembled, name: str) -> ExportedProgram:
    with patch(LAYERS_ONCE, lambda program: contextlib.nullcontext(Mock())):
        return export_program(graphs.programs[name], graphs.spec)


def written(program: ExportedProgram) -> list[str]:
    """All of a program that is read later. Nodes have their place as their name: sizes, which are read wherever they
    are found, take other numbers in other traces."""
    names = {node.name: f"%{place}" for place, node in enumerate(program.graph.nodes) if node.op == "call_function"}

    def renamed(value: Any) -> str:
        return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), str(value))

    def kind(value: Any) -> str:
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, Tensor) else str(value)

    lines = []
    for node in program.graph.nodes:
        values = torch.utils._pytree.tree_map(kind, (node.meta.get("val"), node.meta.get("eager_input_vals")))
        stack = [*node.meta.get("nn_module_stack", {}).items()]
        given = renamed((node.name, node.args, node.kwargs))
        lines.append(f"{node.op} {node.target} {given} {values} {stack} {node.meta.get('stack_trace')}")
    held = [f"{name} {kind(tensor)}" for name, tensor in {**program.state_dict, **program.constants}.items()]
    return [*lines, renamed(program.graph_signature), str(program.range_constraints), *held]


def check(model: Any, repeated: dict[str, int], **options: Any) -> None:
    graphs = assembled(model, **options)
    for name, expected in repeated.items():
        program, count = traced(graphs, name)
        assert (name, count) == (name, expected)
        assert written(program) == written(traced_in_full(graphs, name))


def test_the_graph_is_that_of_every_layer() -> None:
    check(tiny_model("Llama", **SIX), {"prefill": 4, "step": 4})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes", "repeated"),
    [
        (
            "Gemma3Text",
            {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
            {"prefill": 4, "step": 4},
        ),
        ("Qwen3Moe", SIX | {"mlp_only_layers": [0]}, {"prefill": 3, "step": 3}),
        ("DeepseekV3", SIX, {"prefill": 3, "step": 1}),
        (
            "GptOss",
            {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4},
            {"prefill": 4, "step": 4},
        ),
        ("Lfm2", recurrent("conv"), {"step": 2}),
        ("Qwen3Next", recurrent("linear_attention"), {"prefill": 3, "step": 2}),
    ],
)
def test_the_graph_of_mixed_layers_is_that_of_every_layer(
    architecture: str, changes: dict[str, Any], repeated: dict[str, int]
) -> None:
    check(tiny_model(architecture, **changes), repeated)


def test_a_layer_with_another_constant_is_traced_itself() -> None:
    model = tiny_model("Llama", **SIX)
    model.model.layers[4].input_layernorm.variance_epsilon = 0.25
    check(model, {"prefill": 3})


def test_a_layer_with_a_hook_inside_is_traced_itself() -> None:
    model = tiny_model("Llama", **SIX)
    model.model.layers[4].mlp.register_forward_hook(lambda module, given, out: out * 2)
    check(model, {"prefill": 3})


def doubles_the_fourth(layer: Any, out: Tensor) -> Tensor:
    return out * 2 if layer.self_attn.layer_idx == 4 else out


def keeps_what_it_returns(layer: Any, out: Tensor) -> Tensor:
    layer.kept = out
    return out


@pytest.mark.parametrize("more", [doubles_the_fourth, keeps_what_it_returns])
def test_layers_whose_code_tells_them_apart_are_traced(monkeypatch: pytest.MonkeyPatch, more: Any) -> None:
    model = tiny_model("Llama", **SIX)
    original = type(model.model.layers[0]).forward
    monkeypatch.setattr(
        type(model.model.layers[0]),
        "forward",
        lambda self, *given, **named: more(self, original(self, *given, **named)),
    )
    check(model, {"prefill": 0})


def test_what_a_layer_leaves_unseen_has_all_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, left = tiny_model("Llama", **SIX), []
    of_layer, of_norm = type(model.model.layers[0]).forward, type(model.model.norm).forward

    def leave(layer: Any, *given: Any, **named: Any) -> Any:
        out = of_layer(layer, *given, **named)
        left.append(out * 2)
        return out

    def read(norm: Any, x: Tensor) -> Any:
        if norm is model.model.norm:
            x = x + sum(left)
            left.clear()
        return of_norm(norm, x)

    graphs = assembled(model)
    monkeypatch.setattr(type(model.model.layers[0]), "forward", leave)
    monkeypatch.setattr(type(model.model.norm), "forward", read)
    left.clear()
    program, repeated = traced(graphs, "prefill")
    assert repeated == 0 and written(program) == written(traced_in_full(graphs, "prefill"))

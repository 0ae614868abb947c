"""What nothing depends on goes from a graph, writes in place to what nobody reads along with it; all else stays."""

import torch
from models import tiny_model
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.graph_edits import drop_dead_code
from specstep.compile.source import Source


class Writes(torch.nn.Module):
    def forward(self, x, cache):
        unread = x * 2
        unread[:, 0].add_(1)  # through a view
        unread.sin().to(torch.bfloat16)
        read = x * 3
        read[0].mul_(5)
        cache[0].copy_(x[0])
        return read.cos()


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_writes_stay_where_somebody_reads_them():
    x, cache = torch.rand(3, 4), torch.zeros(3, 4)
    program = torch.export.export(Writes(), (x, cache))
    drop_dead_code(program)
    names = targets(program)
    assert "aten.mul_.Tensor" in names and "aten.copy_.default" in names
    assert not {"aten.add_.Tensor", "aten.sin.default", "aten._assert_tensor_metadata.default"} & {*names}
    expected_cache = torch.zeros(3, 4)
    assert torch.equal(program.module()(x, cache), Writes()(x, expected_cache))
    assert torch.equal(cache, expected_cache) and cache.any()


def linear_layers(architecture, drafter="ngram"):
    """Those of the target in a prefill, by layer."""
    options = {"dtype": "float32", "max_seq_len": 128, "drafter": drafter, "nodes": 3}
    graphs = assemble(Source(architecture, tiny_model(architecture), None), make_config(options))
    program = export_program(graphs.prefill, graphs.spec)
    nodes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return [[*node.meta["nn_module_stack"].values()][-1][0].partition("model.model.")[2] for node in nodes]


def test_a_prefill_ends_with_the_keys_and_values_of_the_last_layer():
    """Queries are part of their product."""
    names = linear_layers("Llama")
    assert len(names) == 2 * 7 + 3
    assert names[-3:] == [f"layers.2.self_attn.{part}_proj" for part in "qkv"]


def test_a_prefill_leaves_layers_out_that_share_keys():
    names = linear_layers("Gemma3nText")
    assert names and not [name for name in names if name.startswith(("layers.2", "altup_unembed"))]

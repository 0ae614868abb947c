"""Writes into a compiled program's package what it takes and returns: the runtime compares its tensors with it."""

from typing import Any

from torch.export import ExportedProgram

from ...runtime.inductor.signature import Signature, TensorKind


def signed(config: dict[str, Any], program: ExportedProgram) -> dict[str, Any]:
    """Inductor's settings, with the signature of the program as its package's metadata."""
    return config | {"aot_inductor.metadata": signature_of(program).metadata()}  # Inductor adds to it


def signature_of(program: ExportedProgram) -> Signature:
    """The signature of a traced program as it is now, its weights packed or not."""
    signature = program.graph_signature
    kinds = {node.name: node.meta.get("val") for node in program.graph.nodes}
    stored = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    return Signature(
        [TensorKind.of(kinds[name]) for name in signature.user_inputs],
        [TensorKind.of(kinds[name]) for name in signature.user_outputs],
        {name: TensorKind.of(kinds[place]) for name, place in stored.items()},
    )

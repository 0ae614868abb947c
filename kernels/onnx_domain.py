"""The ONNX domain of our ops. Imported by the ONNX functions only: everything else runs without onnx."""

from typing import Any, TypeVar, Union

from onnx.defs import OpSchema
from onnxscript import BFLOAT16, FLOAT, FLOAT16
from onnxscript.values import OnnxFunction, Op, Opset

OPS = Opset("specstep", 1)
Float = TypeVar("Float", bound=Union[FLOAT, FLOAT16, BFLOAT16])  # noqa: UP007 (all that onnxscript reads)


def write_node(function: OnnxFunction, *inputs: Any, **attributes: Any) -> Any:
    """Write one node of the domain, with the function's signature -> its outputs. A call of the function itself would
    bring its body along, which the exporter puts in place of the node."""
    signature = function.op_signature
    assert signature is not None
    tensors = [
        [(value.name, value.type_constraint) for value in side] for side in (signature.inputs, signature.outputs)
    ]
    types = {
        constraint.name: [f"tensor({str(kind).lower()})" for kind in constraint.allowed_types]
        for side in tensors
        for _, constraint in side
    }
    schema = OpSchema(
        function.name,
        OPS.domain,
        OPS.version,
        inputs=[OpSchema.FormalParameter(name, constraint.name) for name, constraint in tensors[0]],
        outputs=[OpSchema.FormalParameter(name, constraint.name) for name, constraint in tensors[1]],
        type_constraints=[(name, kinds, "") for name, kinds in types.items()],
        attributes=[OpSchema.Attribute(p.name, getattr(OpSchema.AttrType, p.type.name)) for p in signature.attributes],
    )
    return Op(OPS, function.name, schema)(*inputs, **attributes)

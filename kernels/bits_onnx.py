"""The packed bits of `bits.py` as ONNX functions.

Integer arithmetic only, no bit operations: TensorRT has none for int64.
"""

from math import inf

from onnx import TensorProto, helper
from onnxscript import BOOL, FLOAT, INT32, INT64, script
from onnxscript import opset18 as op

from .bits import BITS
from .onnx_domain import OPS

# The greatest logits that the bits of an octet leave: [256, 8].
MOST = helper.make_tensor(
    "most", TensorProto.FLOAT, [256, 8], [inf if octet >> bit & 1 else -inf for octet in range(256) for bit in range(8)]
)
POWERS = helper.make_tensor("powers", TensorProto.INT64, [BITS], [2**bit for bit in range(BITS)])


@script(OPS, default_opset=op)
def pack_bits(mask: BOOL) -> INT32:
    """Bool [B, T, M] -> int32 [B, T, ceil(M / 32)]."""
    count = op.Shape(mask, start=2, end=3)
    words = (count + 31) / 32
    padding = op.Concat(op.Constant(value_ints=[0, 0, 0, 0, 0]), words * 32 - count, axis=0)
    padded = op.Pad(op.Cast(mask, to=INT64.dtype), padding)
    digits = op.Reshape(padded, op.Concat(op.Shape(mask, start=0, end=2), words, [32], axis=0))
    unsigned = op.ReduceSum(digits * op.Constant(value=POWERS), [-1], keepdims=0)
    return op.Cast(op.Where(unsigned >= 2147483648, unsigned - 4294967296, unsigned), to=INT32.dtype)


@script(OPS, default_opset=op)
def unpack_bits(words: INT32, count: INT64) -> BOOL:
    """Int32 [B, T, W], count [1] -> bool [B, T, count]."""
    signed = op.Cast(words, to=INT64.dtype)
    unsigned = op.Unsqueeze(op.Where(signed < 0, signed + 4294967296, signed), [-1])
    low = op.Constant(value_ints=[1, 2, 4, 8, 16, 32, 64, 128])  # short, so that ONNX Runtime merges them in all calls
    powers = op.Reshape(op.Unsqueeze(op.Constant(value_ints=[1, 256, 65536, 16777216]), [1]) * low, [-1])
    high = unsigned / powers  # [B, T, W, 32]
    digits = op.Reshape(high - high / 2 * 2, [0, 0, -1])
    return op.Slice(digits, [0], count, [2]) > 0


@script(OPS, default_opset=op)
def only_allowed(x: FLOAT, allowed: INT32, masked: INT64) -> FLOAT:
    """See `bits.only_allowed`."""
    signed = op.Cast(allowed, to=INT64.dtype)
    unsigned = op.Unsqueeze(op.Where(signed < 0, signed + 4294967296, signed), [3])
    octets = op.Mod(unsigned / op.Constant(value_ints=[1, 256, 65536, 16777216]), 256)  # [B, N, W, 4]
    octets = op.Where(op.Unsqueeze(masked, [1, 2, 3]) == 0, 255, octets)
    most = op.Reshape(op.Gather(op.Constant(value=MOST), octets), [0, 0, -1])
    return op.Min(x, op.Slice(most, [0], op.Shape(x, start=2, end=3), [2]))

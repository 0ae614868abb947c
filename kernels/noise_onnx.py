"""The noise of `noise.py` as ONNX functions, the same line by line, for all functions that add it."""

from onnxscript import FLOAT, INT32, INT64, UINT32, script
from onnxscript import opset18 as op

from .onnx_domain import OPS


@script(OPS, default_opset=op)
def noise_round(x: INT64) -> INT64:
    """See `noise._round`, of x modulo 2**32. In 32 bits, where sums and products wrap: ONNX Runtime takes a fifth of
    the time of quotients and remainders. TensorRT, without unsigned integers, gets those in place of this function
    (`compile/tensorrt/graph.py`)."""
    word = op.Cast(x, to=INT32.dtype)
    word = word * (word + word + 1)
    half = op.Cast(op.Constant(value_ints=[16]), to=UINT32.dtype)
    high = op.Cast(op.BitShift(op.Cast(word, to=UINT32.dtype), half, direction="RIGHT"), to=INT32.dtype)
    return op.Cast(op.Cast(word * 65536 + high, to=UINT32.dtype), to=INT64.dtype)


@script(OPS, default_opset=op)
def noise_key(low: INT64, high: INT64, positions: INT64) -> INT64:
    """See `noise._key`. low, high: a seed's words, the offset added to the low one."""
    key = noise_round(noise_round(low))
    key = noise_round(noise_round(key + high))
    return noise_round(noise_round(key + positions))


@script(OPS, default_opset=op)
def noise_bits(seeds: INT64, positions: INT64, tokens: INT64) -> INT64:
    """See `noise.noise_bits`."""
    low, high = op.Mod(seeds, 4294967296), seeds / 4294967296
    first = noise_key(low + 0x9E3779B9, high, positions)
    second = noise_key(low + 0x85EBCA6B, high, positions)
    return noise_round(noise_round(noise_round(first + tokens) + second))


@script(OPS, default_opset=op)
def gumbel(seeds: INT64, positions: INT64, tokens: INT64) -> FLOAT:
    """See `noise.gumbel`."""
    bits = op.Cast(noise_bits(seeds, positions, tokens) / 2, to=FLOAT.dtype)
    w = op.Min((bits + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    series = w * (1.0 + w * (0.5 + w * (0.3333333432674408 + w * (0.25 + w * 0.20000000298023224))))
    return -op.Log(op.Where(w < 0.015625, series, -op.Log(1.0 - w)))


HELPERS = (noise_round, noise_key, noise_bits, gumbel)

"""The ONNX domain of our ops. Imported by the ONNX functions only: everything else runs without onnx."""

from onnxscript.values import Opset

OPS = Opset("specstep", 1)

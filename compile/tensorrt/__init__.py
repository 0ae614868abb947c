"""Lower an engine to TensorRT plans, by way of ONNX."""

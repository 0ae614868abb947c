"""Lower an engine to ONNX."""

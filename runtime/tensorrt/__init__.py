"""Run TensorRT plans, without torch."""

"""A model of Triton Inference Server: an engine behind its Python backend."""

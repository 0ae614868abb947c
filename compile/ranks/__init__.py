"""How a model is cut into parts, and shared between ranks."""

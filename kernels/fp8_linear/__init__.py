"""Linear layers of a GPU with weights of eight bits: floats with a scale for each output."""

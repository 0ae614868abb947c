"""Traces each kind of layer once or twice, and repeats what was traced for the layers that are alike."""

"""The ranking op: the best of a node's few candidates, with the noise that the target will add."""

"""The tree-build op: from parents to the packed ancestor mask, depths and retrieve arrays."""

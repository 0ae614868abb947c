"""The tree-build op: from parents to the packed ancestor mask and the depths."""

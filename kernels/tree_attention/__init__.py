"""Attention of tree nodes over the committed cache and, under the packed ancestor mask, over the tree itself."""

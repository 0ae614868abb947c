"""One level of a tree, scored by an n-gram model."""

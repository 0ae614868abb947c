"""Linear attention over a tree: each token's state is its parent's, decayed and written to."""

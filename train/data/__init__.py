"""Token sequences to learn from: the directory that holds them, the files they come from, their hidden states."""

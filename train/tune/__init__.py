"""Which drafter and which tree are fastest for a model on a machine."""

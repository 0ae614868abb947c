"""The choice op: the target's token after each node, sampled or greedy."""

"""RWKV's attention over a tree: each token adds to the weighted sums that its parent leaves."""

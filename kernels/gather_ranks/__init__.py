"""What every rank has of a tensor, on a GPU: the collective that `all_reduce` and `all_gather` are made of there."""

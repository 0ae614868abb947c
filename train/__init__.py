"""Drafters made from text: `collect` makes `data`, `count` and `eagle3` learn from it, `tune` takes the fastest."""

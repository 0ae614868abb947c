"""Drafters made from text: `collect` writes `data`, `count` and `eagle3` learn from it, `tune` chooses what is fastest."""

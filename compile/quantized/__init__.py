"""Quantised checkpoints of transformers' ecosystem: a reader for each publisher, and one normal form."""

"""Speculative decoding as a compiled artifact."""

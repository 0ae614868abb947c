"""Drafters, trained on what their target wrote."""

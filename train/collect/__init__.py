"""Data that a model makes: questions that it asks itself, and its answers."""

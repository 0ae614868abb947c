"""The forms in which models write calls of tools, and which of them a model has."""

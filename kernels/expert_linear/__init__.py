"""Linear layers of a mixture of experts."""

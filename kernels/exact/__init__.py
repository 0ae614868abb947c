"""Functions and reductions whose bits do not depend on what is computed beside them."""

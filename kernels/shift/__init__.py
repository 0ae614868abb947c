"""Commits the accepted path of a short convolution: its inputs enter the window of the last ones."""

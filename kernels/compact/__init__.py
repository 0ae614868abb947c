"""The cache-commit op: move the accepted path's K and V to the end of the committed tokens."""

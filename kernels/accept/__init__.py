"""The acceptance op: which path of a verified tree the target agrees with."""

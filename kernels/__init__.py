"""Custom ops: one folder each with its reference, its fast implementations and their registration."""

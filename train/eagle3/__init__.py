"""An EAGLE-3 head, trained on what its target wrote."""

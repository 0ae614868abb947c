"""Linear layers for a few rows on the CPU, at the speed at which memory delivers the weight."""

from .op import small_expert_linear, small_linear

__all__ = ["small_expert_linear", "small_linear"]

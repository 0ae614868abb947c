"""What the compaction's kernel is launched with, by torch and by TensorRT."""

from ..plugin import power_of_2

MOST_LEVELS = 16  # of a path, that a program moves at once


def blocks(levels: int, size: int) -> dict[str, int]:
    """Block sizes and options for paths of `levels` nodes below the root, and heads of `size`."""
    return {"BLOCK_P": min(MOST_LEVELS, power_of_2(levels)), "BLOCK_D": power_of_2(size), "num_warps": 4}

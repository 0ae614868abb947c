"""What the tree layout's kernel is launched with, by torch and by TensorRT."""

from ..plugin import power_of_2


def blocks(words: int) -> dict[str, int]:
    """Block sizes and options for trees of `words` words of nodes."""
    return {"BLOCK_T": 32, "BLOCK_W": power_of_2(words), "num_warps": 1}

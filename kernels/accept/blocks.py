"""What the acceptance kernel is launched with, by torch and by TensorRT."""

from ..plugin import power_of_2


def blocks(words: int, path_length: int) -> dict[str, int]:
    """Block sizes for trees of `words` words of nodes: a bound that does not vary with the nodes of a step."""
    sizes = {"BLOCK_T": 32 * words, "BLOCK_W": words, "BLOCK_P": path_length}
    return {name: power_of_2(size) for name, size in sizes.items()} | {"num_warps": 4}

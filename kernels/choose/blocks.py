"""What the choice's kernel is launched with, by torch and by TensorRT."""

from ..plugin import Dim, ceil_div, power_of_2

BLOCK_V = 4096  # logits that a program reads at once
LIST = 4096  # processed logits that it searches in registers


def scratch_size(vocabulary: Dim) -> Dim:
    """Numbers that a program works with in memory: a row of processed logits in whole blocks, and gathered ones."""
    return ceil_div(vocabulary, BLOCK_V) * BLOCK_V + LIST


def blocks(words: int, biases: int, bans: int) -> dict[str, int]:
    """Block sizes and options of the kernel for trees of `words` words of nodes: a bound that does not vary with the
    nodes of a step. None spills (see compile_cubin)."""
    sizes = {"BLOCK_T": 32 * words, "BLOCK_E": biases, "BLOCK_X": bans}
    return {
        "BLOCK_V": BLOCK_V,
        "BLOCK_N": 1024,
        **{name: power_of_2(size) for name, size in sizes.items()},
        "num_warps": 8,
    }

"""What the kernel of the likeliest tokens is launched with, by torch and by TensorRT."""

from ..plugin import power_of_2

BLOCK_V = 4096  # logits that a program reads at once


def blocks(vocabulary: int, top: int) -> dict[str, int]:
    """Block sizes and options of the kernel; none spills (see compile_cubin)."""
    lane = -(-vocabulary // BLOCK_V)  # logits of one lane
    return {"BLOCK_V": BLOCK_V, "BLOCK_L": power_of_2(lane), "BLOCK_TOP": power_of_2(top), "num_warps": 8}

"""What the kernel of the best candidates is launched with, by torch and by TensorRT."""

from ..plugin import power_of_2


def blocks(candidates: int) -> dict[str, int]:
    """Block size and options of the kernel."""
    return {"BLOCK_C": max(power_of_2(candidates), 32), "num_warps": 1 if candidates <= 128 else 4}

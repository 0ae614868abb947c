"""What the kernels of linear attention are launched with."""

from ..plugin import power_of_2

MOST_COLUMNS = 16  # of a value, in one program: with 128 rows, 16 KiB of registers for two states


def blocks(n: int, p: int) -> dict[str, int]:
    """Block sizes and options for states [N, P]."""
    return {"BLOCK_N": power_of_2(n), "BLOCK_P": min(MOST_COLUMNS, power_of_2(p)), "num_warps": 4}

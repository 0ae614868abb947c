"""What the two kernels of tree attention are launched with, by torch and by TensorRT."""

from ..plugin import power_of_2

PROGRAMS = 256  # split the cache until about this many programs run: two per multiprocessor of a large GPU
MAX_SPLITS = 64
LONG = 4096  # tree nodes of a pass whose size is not known when the kernel is compiled: a chunk of a prompt


def split_blocks(rows: int, key_size: int, value_size: int, element_size: int, softcap: float) -> dict[str, int]:
    """Block sizes and options of the split kernel for `rows` = group * nodes; none spills (see compile_cubin)."""
    heads = {"BLOCK_D": max(16, power_of_2(key_size)), "BLOCK_DV": max(16, power_of_2(value_size))}
    widest = max(heads.values())
    if widest > 256:  # Gemma 4 has 512: a tile of them fills registers and the 48 KiB that TensorRT gives a block
        tile = (4, 4) if element_size == 4 else (16, 8)
        return {**heads, "BLOCK_R": tile[0], "BLOCK_S": 16, "num_warps": tile[1], "num_stages": 1}
    largest = 16 if element_size == 4 else 64 if widest <= 128 else 32
    block_r = min(largest, max(16, power_of_2(rows)))
    large = block_r == 64
    wide = large and softcap > 0  # more values to keep in registers
    return {
        **heads,
        "BLOCK_R": block_r,
        "BLOCK_S": 16 if element_size == 4 else 64 if block_r == 16 or (large and widest <= 64) else 32,
        "num_warps": 8 if wide else 4,
        # On an H200 a large tile that loads ahead takes 1.4 to 1.7 times as long.
        "num_stages": 1 if large and not wide else 2,
    }


def merge_blocks(splits: int, value_size: int) -> dict[str, int]:
    """Those of the kernel that merges at most `splits` splits."""
    columns = power_of_2(value_size)
    return {"BLOCK_DV": columns, "BLOCK_N": power_of_2(splits), "num_warps": 8 if columns > 256 else 4}


def most_splits(programs: int) -> int:
    """Splits to have memory for, where the largest pass of a single row takes `programs` for each of them."""
    return max(1, min(MAX_SPLITS, 2 * PROGRAMS // programs))  # twice: smaller passes have fewer programs

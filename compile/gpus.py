"""The GPUs that an engine can be built for without them."""

from typing import NamedTuple


class GPU(NamedTuple):
    """What the compiler asks of a GPU: the numbers shape its code, any GPU of the compute capability runs it.

    capability: its compute capability. threads: most on a multiprocessor. shared: most bytes of shared memory that a
    block may have.
    """

    capability: str
    name: str
    multiprocessors: int
    threads: int
    shared: int

    @property
    def arch(self) -> int:
        """The compute capability as compilers write it, 90 for 9.0."""
        return int(self.capability.replace(".", ""))


GPUS = {
    gpu.capability: gpu
    for gpu in (
        GPU("8.0", "A100", 108, 2048, 166912),
        GPU("8.6", "A10", 72, 1536, 101376),
        GPU("8.9", "L4", 58, 1536, 101376),
        GPU("9.0", "H100", 132, 2048, 232448),
        GPU("10.0", "B200", 148, 2048, 232448),
        GPU("12.0", "RTX 5090", 170, 1536, 101376),
    )
}

"""Safetensors files, with the modes of other files."""

import os
import stat
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors by name, and what is said of them. The file's mode is that of a new file, which the umask says: the
    library makes it 0600, and no other user could load it. Raises OSError and SafetensorError."""
    with path.open("wb") as new:
        mode = stat.S_IMODE(os.fstat(new.fileno()).st_mode)
    save_file(tensors, path, metadata)
    path.chmod(mode)

"""What lies inside or beside a target's checkpoint: heads in folders, and modules among its own tensors."""

import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ..locate import gguf_file
from ..source import Source
from .block_config import read_block_config
from .block_file import is_block
from .eagle3_config import read_config
from .eagle3_file import check_target, is_eagle3
from .mtp_file import NAME as MTP
from .mtp_file import has_module
from .peagle_file import is_peagle, read_peagle
from .published import FILES, config_of


def _read_block(path: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """As `read_config`, for a block drafter."""
    block, _ = read_block_config(str(path), config_of(str(path)) or {}, hidden, layers)
    if block.mask_token >= vocabulary:
        raise ValueError(block.mask_token)


READERS: tuple[tuple[Callable[[str], bool], Callable[..., Any]], ...] = (
    (is_block, _read_block),
    (is_peagle, read_peagle),
    (is_eagle3, read_config),
)


def drafters_beside(target: Source) -> list[str]:
    """Their names, as the option --drafter takes them: heads first."""
    heads = [str(path) for path in heads_beside(target) if "," not in str(path)]
    return [*heads, *([MTP] if has_module(target) else [])]


def heads_beside(target: Source) -> list[Path]:
    """Block drafters, EAGLE-3 and P-EAGLE heads for a target that lie in folders of its directory, or next to its
    directory or file in folders whose names begin with its name."""
    place = gguf_file(target.name) or Path(target.name).expanduser()
    if not place.exists():
        return []
    place = place.absolute()
    name = place.stem if place.is_file() else place.name
    near = [*(place.iterdir() if place.is_dir() else ()), *place.parent.glob(f"{glob.escape(name)}*")]
    return [path for path in sorted(near) if path != place and path.is_dir() and _is_for(path, target)]


def _is_for(path: Path, target: Source) -> bool:
    """Whether a directory is a head with weights, of the target's sizes and, where it says so, for its tokenizer."""
    read = next((read for is_one, read in READERS if is_one(str(path))), None)
    if read is None or not any((path / file).is_file() for file in FILES):
        return False
    text = target.model.config.get_text_config()
    vocabulary = target.model.get_input_embeddings().num_embeddings
    try:
        check_target(str(path), target)
        read(path / "config.json", text.hidden_size, text.num_hidden_layers, vocabulary)
    except (BuildError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return True

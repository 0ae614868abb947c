"""The kinds of drafters that `specstep train-drafter` trains, as `--kind` has them."""

from .block import BLOCK
from .eagle3 import EAGLE3
from .kind import Kind
from .peagle import P_EAGLE

KINDS: dict[str, Kind] = {"eagle3": EAGLE3, "p-eagle": P_EAGLE, "block": BLOCK}

"""Every TensorRT plugin of ours."""

from .accept.plugin import Accept
from .cache_write.plugin import CacheWrite
from .choose.plugin import Choose
from .compact.plugin import Compact
from .plugin import Plugin
from .rank.plugin import Rank
from .top_log_probs.plugin import TopLogProbs
from .tree_attention.plugin import AttendSplit, MergeSplits
from .tree_layout.plugin import TreeLayout

PLUGINS: tuple[Plugin, ...] = (
    TreeLayout(), CacheWrite(), AttendSplit(), MergeSplits(), Choose(), Accept(), Compact(), TopLogProbs(), Rank(),
)  # fmt: skip

"""Every TensorRT plugin of ours."""

from .accept.plugin import Accept
from .cache_write.plugin import CacheWrite
from .compact.plugin import Compact
from .plugin import Plugin
from .tree_attention.plugin import AttendSplit, MergeSplits
from .tree_layout.plugin import TreeLayout

PLUGINS: tuple[Plugin, ...] = (TreeLayout(), CacheWrite(), AttendSplit(), MergeSplits(), Accept(), Compact())

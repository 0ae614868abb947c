"""The sizes of every plugin's tensors in a model, for what compiles kernels without one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..controls import BANNED_WORDS, BIASES, STOP_IDS, TOP_LOGPROBS, Sampling
from .plugin import INTEGERS
from .tree_attention.plugin import AttendSplit


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, and of a tree of `nodes` nodes, the root included."""

    dtype: str  # of activations and caches
    key_size: int  # elements of a query or key head
    value_size: int  # of a value head
    heads: int = 4  # of queries
    kv_heads: int = 1  # of keys and values
    nodes: int = 65  # of the tree, the root included
    window: int = 0  # sliding window in tokens; 0: none
    softcap: float = 0.0  # of attention scores; 0: none
    batch: int = 1  # rows
    slots: int = 2112  # of a cache
    max_depth: int = 5  # of the tree
    vocabulary: int = 49152  # tokens

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of every plugin."""
        logits = {"scale": self.key_size**-0.5, "window": self.window, "softcap": self.softcap}
        return {**logits, "max_depth": self.max_depth, "top": TOP_LOGPROBS, "top_k": 8}

    @property
    def inputs(self) -> dict[str, list[Sequence[int]]]:
        """Plugin -> sizes of its inputs."""
        rows, tree = (self.batch,), (self.batch, self.nodes)
        bits = (*tree, (self.nodes + 31) // 32)
        queries = (self.batch, self.heads, self.nodes, self.key_size)
        keys, values = ((self.batch, self.kv_heads, self.slots, size) for size in (self.key_size, self.value_size))
        written = (self.batch, self.kv_heads, self.nodes)
        attention: list[Sequence[int]] = [queries, keys, values, rows, tree, bits, tree]
        splits = AttendSplit()
        logits, path = (*tree, self.vocabulary), (self.batch, self.max_depth + 1)
        biases, banned = (self.batch, BIASES), (*tree, BANNED_WORDS + STOP_IDS)
        allowed, sampling = (*tree, (self.vocabulary + 31) // 32), (self.batch, len(Sampling._fields))
        candidates = (self.batch, 8, 20)
        asked: list[Sequence[int]] = [rows, sampling, rows, biases, biases, banned, allowed, rows]
        return {
            "tree_layout": [tree, tree],
            "cache_write": [values, (*written, 3), (*written, self.value_size)],
            "tree_attention_split": attention,
            "tree_attention_merge": [
                *splits.output_shapes(splits.named(attention), self.attributes, INTEGERS), (self.heads,)
            ],
            "choose": [logits, tree, bits, tree, (self.batch, self.slots), rows, *asked],
            "accept": [tree, tree, tree, bits, tree, tree],
            "compact": [values, rows, path, rows],
            "rank": [candidates, candidates, rows, rows, rows],
            "top_log_probs": [logits, path, rows, rows, rows, path, (self.vocabulary,), allowed, rows],
        }  # fmt: skip

    def __str__(self) -> str:
        options = " window softcap" if self.window else ""
        sizes = f"D={self.key_size},{self.value_size} G={self.heads} T={self.nodes} V={self.vocabulary}"
        return f"{self.dtype} {sizes}{options}"

"""config.json of a block drafter, in each of the formats that they are published in.

| who writes it | how it is known | layer ids | slot k says | a slot sees of its block |
|---|---|---|---|---|
| z-lab (DFlash) | `dflash_config` | t is state t + 1 | token k behind the root | all; sliding layers: to itself |
| JetSpec | `causal_head` in it | the same | the same | to itself |
| DeepSpec (DSpark) | `target_layer_ids` at the top | t + 1, -1 is 0 | token k + 1 | all |
| speculators | its types dflash and dspark | i is state i | `sample_from_anchor` | `sliding_window_non_causal` |

Hidden states are transformers', see `eagle3_config`. What else such a config may ask for is refused by its name.
"""

from dataclasses import dataclass
from typing import Any

from ...errors import BuildError
from ...graphs.drafters.block import BlockConfig, LayerMask
from ...graphs.drafters.markov import MARKOVS
from .eagle3_config import layer_config

SPECULATORS = ("dflash", "dspark")
OTHERS = ("dflash2", "domino")  # of the same family, not taken
DFLASH_FIELDS = {"mask_token_id", "target_layer_ids", "causal_head", "target_hidden_size", "block_size"}


@dataclass(frozen=True)
class Correction:
    """Of the logits by the token ahead. rank: 0 for none; kind: a key of `MARKOVS`."""

    rank: int = 0
    kind: str = "vanilla"


def is_block_config(data: dict[str, Any]) -> bool:
    """Whether that is the config.json of a block drafter, one that is not taken, too."""
    names = "".join(data.get("architectures") or ())
    kind = data.get("speculators_model_type")
    written = any(name in names for name in ("DFlash", "DSpark", "Domino"))
    return kind in SPECULATORS + OTHERS or "dflash_config" in data or (kind is None and written)


def read_block_config(
    name: str, data: dict[str, Any], target_hidden: int, target_layers: int
) -> tuple[BlockConfig, Correction]:
    """What the config.json of a block drafter says, for a target of these sizes. Raises BuildError."""
    kind = data.get("speculators_model_type")
    if kind in OTHERS:
        raise _refused(name, "speculators_model_type", " or ".join(SPECULATORS), kind)
    reader = _Speculators if kind else _ZLab if "dflash_config" in data else _DeepSpec
    return reader(name, data, target_hidden, target_layers).read()


class _ZLab:
    """z-lab's DFlash and JetSpec: the fields of Qwen3, and `dflash_config`."""

    def __init__(self, name: str, data: dict[str, Any], target_hidden: int, target_layers: int):
        self.name, self.data, self.target_hidden, self.target_layers = name, data, target_hidden, target_layers
        self.layer: dict[str, Any] = self.inner()
        self.layers = self.number("num_hidden_layers", self.layer.get("num_hidden_layers"), 1)

    def read(self) -> tuple[BlockConfig, Correction]:
        if self.layer.get("model_type", "qwen3") not in ("qwen3", "llama"):
            raise _refused(self.name, "model_type", "qwen3, whose layers it has", self.layer["model_type"])
        expected = self.data.get("num_target_layers", self.target_layers)
        if expected != self.target_layers:
            raise _refused(self.name, "num_target_layers", f"the target's {self.target_layers}", expected)
        config = layer_config(
            self.name,
            {field: value for field, value in self.layer.items() if field != "num_hidden_layers"},
            self.target_hidden,
            self.wide(),
        )
        from_anchor = self.from_anchor()
        correction = self.correction(from_anchor)
        block = BlockConfig(
            layer=config,
            feature_layers=self.feature_layers(),
            target_hidden_size=self.target_hidden,
            masks=tuple(self.mask(kind) for kind in self.layer_types()),
            block_size=self.number("block_size", self.data.get("block_size"), 1 if from_anchor else 2),
            mask_token=self.number("mask_token_id", self.own().get("mask_token_id"), 0),
            from_anchor=from_anchor,
            shift_unsaid="sample_from_anchor" not in self.data and correction.kind != "rnn",
        )
        return block, correction

    def inner(self) -> dict[str, Any]:
        """The fields of the layers."""
        return self.data

    def own(self) -> dict[str, Any]:
        """Where the fields are that no model has."""
        found = self.data["dflash_config"] or {}
        odd = sorted(field for field in found if field not in DFLASH_FIELDS)
        if odd:
            raise _refused(self.name, f"dflash_config.{odd[0]}", "none", found[odd[0]])
        return dict(found)

    def wide(self) -> int | None:
        """The hidden size of the target that it is for; None for its own."""
        wide: int | None = self.own().get("target_hidden_size")
        if wide not in (None, self.layer.get("hidden_size")):
            raise _refused(self.name, "dflash_config.target_hidden_size", "that of the drafter", wide)
        return wide

    def ids(self) -> Any:
        """Which layers it reads, by the publisher's numbers; z-lab's own where it says none."""
        given = self.own().get("target_layer_ids")
        if given is not None:
            return given
        last, gaps = self.target_layers - 3, self.layers - 1
        return [round(1 + i * (last - 1) / gaps) for i in range(self.layers)] if gaps else [self.target_layers // 2]

    def feature_layers(self) -> tuple[int, ...]:
        """Indices of hidden states."""
        return self.hidden_states("target_layer_ids", self.ids(), 1)

    def hidden_states(self, field: str, ids: Any, offset: int) -> tuple[int, ...]:
        """Ids of layers, each `offset` below the index of the hidden state."""
        good = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        if not good or not all(0 <= i + offset <= self.target_layers for i in ids):
            raise _refused(self.name, field, f"layers {-offset} to {self.target_layers - offset} of the target", ids)
        return tuple(i + offset for i in ids)

    def layer_types(self) -> list[str]:
        found = self.layer.get("layer_types") or ["full_attention"] * self.layers
        if len(found) != self.layers or {*found} - {"full_attention", "sliding_attention"}:
            raise _refused(self.name, "layer_types", f"full_attention or sliding_attention for {self.layers}", found)
        return list(found)

    def mask(self, kind: str) -> LayerMask:
        if kind == "full_attention":
            return LayerMask(self.causal(False))
        return LayerMask(self.causal(True), self.number("sliding_window", self.layer.get("sliding_window"), 1))

    def causal(self, sliding: bool) -> bool:
        """Whether a slot sees those up to its own alone, in such a layer."""
        return sliding or bool(self.own().get("causal_head"))

    def from_anchor(self) -> bool:
        """What slot k says, see `BlockConfig`; where the publisher leaves it open, the drafts of a text decide."""
        return bool(self.data.get("sample_from_anchor", self.usual_shift()))

    def usual_shift(self) -> bool:
        return False

    def correction(self, from_anchor: bool) -> Correction:
        rank = self.number("markov_rank", self.data.get("markov_rank", 0), 0)
        kind = self.data.get("markov_head_type", "vanilla")
        if rank and (kind not in MARKOVS or (kind == "rnn" and not from_anchor)):
            known = [name for name in MARKOVS if from_anchor or name != "rnn"]
            raise _refused(self.name, "markov_head_type", " or ".join(known), kind)
        return Correction(rank, kind)

    def number(self, field: str, value: Any, least: int) -> int:
        if type(value) is not int or value < least:
            raise _refused(self.name, field, f"a number from {least} on", value)
        return value


class _DeepSpec(_ZLab):
    """DeepSpec's DSpark: the same, its own fields at the top."""

    def own(self) -> dict[str, Any]:
        return self.data

    def wide(self) -> int | None:
        return None

    def ids(self) -> Any:
        return self.data.get("target_layer_ids")

    def causal(self, sliding: bool) -> bool:
        if sliding:
            raise _refused(self.name, "layer_types", "full_attention alone", "sliding_attention")
        return False

    def usual_shift(self) -> bool:
        return True


class _Speculators(_ZLab):
    """Types dflash and dspark of speculators: the fields of the layers in `transformer_layer_config`."""

    def inner(self) -> dict[str, Any]:
        inner = self.data.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise _refused(self.name, "transformer_layer_config", "the fields of its layers", inner)
        return inner

    def own(self) -> dict[str, Any]:
        if self.data.get("topk_context"):
            raise _refused(self.name, "topk_context", "0, attention to all of the text", self.data["topk_context"])
        return self.data

    def wide(self) -> int | None:
        wide: int | None = self.data.get("target_hidden_size")
        return wide

    def feature_layers(self) -> tuple[int, ...]:
        field = "aux_hidden_state_layer_ids"
        return self.hidden_states(field, self.data.get(field), 0)

    def causal(self, sliding: bool) -> bool:
        if not sliding:
            return False
        both_ways = self.data.get("sliding_window_non_causal")
        if type(both_ways) is not bool:  # vLLM assumes true, speculators false
            raise _refused(self.name, "sliding_window_non_causal", "true or false; add what it is", both_ways)
        return not both_ways

    def usual_shift(self) -> bool:
        return self.data["speculators_model_type"] == "dspark"

    def correction(self, from_anchor: bool) -> Correction:
        if self.data["speculators_model_type"] == "dflash":
            return Correction()
        return super().correction(from_anchor)


def _refused(name: str, field: str, expected: str, got: Any) -> BuildError:
    return BuildError(f"drafter: {name}: config.json: {field}: expected {expected}, got {got!r}")

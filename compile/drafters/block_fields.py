"""config.json of a block drafter as z-lab writes it, on which the others build (`block_config`)."""

from typing import Any, NamedTuple

from ...errors import BuildError
from ...graphs.drafters.block import BlockConfig
from ...graphs.drafters.block_layer import LayerMask
from ...graphs.drafters.correction import MARKOVS
from .eagle3_config import OWN_LAYERS, layer_config

DFLASH_FIELDS = {"mask_token_id", "target_layer_ids", "causal_head", "target_hidden_size", "block_size"}


class Bigrams(NamedTuple):
    """A correction by the token ahead. kind: a key of `MARKOVS`."""

    rank: int
    kind: str


class PathCorrection(NamedTuple):
    """A correction by the path, of Domino: sizes of its layers, and how many depths it leaves alone."""

    inner: int
    memory: int
    skipped: int


class Selected(NamedTuple):
    """A choice among so many of a slot's likeliest tokens, of DFlash2, by the token ahead."""

    rank: int
    among: int


Layers = tuple[tuple[int, ...], tuple[int, ...] | None]
Corrected = Bigrams | PathCorrection | Selected | None
Read = tuple[BlockConfig, Corrected]


class ZLab:
    """What all have that build on z-lab's DFlash: the fields of Qwen3, and `dflash_config`."""

    def __init__(self, name: str, data: dict[str, Any], target_hidden: int, target_layers: int):
        self.name, self.data, self.target_hidden, self.target_layers = name, data, target_hidden, target_layers
        self.layer: dict[str, Any] = self.inner()
        self.layers = self.number("num_hidden_layers", self.layer.get("num_hidden_layers"), 1)

    fields = DFLASH_FIELDS

    def read(self) -> Read:
        if self.layer.get("model_type", "qwen3") not in ("qwen3", "llama"):
            raise refused(self.name, "model_type", "qwen3, whose layers it has", self.layer["model_type"])
        if not all(fields.get("is_neox_style", True) is True for fields in (self.data, self.layer)):
            raise refused(self.name, "is_neox_style", "true: halves of heads are rotated, no pairs", False)
        expected = self.data.get("num_target_layers", self.target_layers)
        if expected != self.target_layers:
            raise refused(self.name, "num_target_layers", f"the target's {self.target_layers}", expected)
        config = layer_config(
            self.name,
            {field: value for field, value in self.layer.items() if field != "num_hidden_layers"},
            self.target_hidden,
            self.wide(),
        )
        from_anchor, (layers, other) = self.from_anchor(), self.feature_layers()
        correction = self.correction(from_anchor)
        anchored = isinstance(correction, Bigrams) and correction.kind == "rnn"  # it exists for one shift alone
        block_size = self.number("block_size", self.value("block_size"), 1 if self.says_all() else 2)
        multiplier, softcap = self.logits_scale()
        block = BlockConfig(
            layer=config,
            feature_layers=layers,
            other_layers=other,
            target_hidden_size=self.target_hidden,
            masks=tuple(self.mask(kind) for kind in self.layer_types()),
            block_size=block_size,
            most_depth=block_size if self.says_all() else block_size - 1,
            mask_token=self.number("mask_token_id", self.value("mask_token_id"), 0),
            from_anchor=from_anchor,
            convolution=self.convolution(),
            multiplier=multiplier,
            softcap=softcap,
            shift_unsaid=block_size > 1 and not self.says_shift() and not anchored,
            mask_unsaid="sliding_attention" in self.layer_types() and not self.says_mask(),
        )
        return block, correction

    def inner(self) -> dict[str, Any]:
        """The fields of the layers."""
        return self.data

    def own(self) -> dict[str, Any]:
        """Where the fields are that no model has."""
        found = self.data["dflash_config"] or {}
        odd = sorted(field for field in found if field not in self.fields)
        if odd:
            raise refused(self.name, f"dflash_config.{odd[0]}", "none", found[odd[0]])
        return dict(found)

    def value(self, field: str) -> Any:
        """A field of these, which may lie at the top, too."""
        found = self.own().get(field)
        return self.data.get(field) if found is None else found

    def wide(self) -> int | None:
        """The hidden size of the target that it is for; None for its own."""
        wide: int | None = self.own().get("target_hidden_size")
        if wide not in (None, self.layer.get("hidden_size")):
            raise refused(self.name, "dflash_config.target_hidden_size", "that of the drafter", wide)
        return wide

    def ids(self) -> Any:
        """Which layers it reads, by the publisher's numbers; z-lab's own where it says none."""
        given = self.value("target_layer_ids")
        if given is not None:
            return given
        last, gaps = self.target_layers - 3, self.layers - 1
        return [round(1 + i * (last - 1) / gaps) for i in range(self.layers)] if gaps else [self.target_layers // 2]

    def feature_layers(self) -> Layers:
        """Indices of hidden states, and what else they may be."""
        usual, other = self.hidden_states("target_layer_ids", self.ids(), 1)
        return usual, other if self.value("target_layer_ids") is not None else None

    def hidden_states(self, field: str, ids: Any, offset: int) -> Layers:
        """Ids of layers, each `offset`, 0 or 1, below the index of the hidden state, as their writer has them; or else
        1 - `offset`, where there are such states. The field `feature_layers` has the indices themselves."""
        own = self.data.get(OWN_LAYERS)
        field, ids, offset = (field, ids, offset) if own is None else (OWN_LAYERS, own, 0)
        good = isinstance(ids, list) and ids and all(type(i) is int for i in ids)
        if not good or not all(0 <= i + offset <= self.target_layers for i in ids):
            raise refused(self.name, field, f"layers {-offset} to {self.target_layers - offset} of the target", ids)
        usual, other = (tuple(i + shift for i in ids) for shift in (offset, 1 - offset))
        return usual, other if own is None and min(other) >= 0 and max(other) <= self.target_layers else None

    def layer_types(self) -> list[str]:
        found = self.layer.get("layer_types") or ["full_attention"] * self.layers
        if len(found) != self.layers or {*found} - {"full_attention", "sliding_attention"}:
            raise refused(self.name, "layer_types", f"full_attention or sliding_attention for {self.layers}", found)
        return list(found)

    def mask(self, kind: str) -> LayerMask:
        if kind == "full_attention":
            return LayerMask(self.causal(False))
        return LayerMask(self.causal(True), self.number("sliding_window", self.layer.get("sliding_window"), 1))

    def causal(self, sliding: bool) -> bool:
        """Whether a slot sees those up to its own alone, in such a layer."""
        said = self.data.get("is_causal")
        if said is None:
            return sliding or bool(self.own().get("causal_head"))
        if type(said) is not bool:
            raise refused(self.name, "is_causal", "true or false", said)
        return said

    def from_anchor(self) -> bool:
        """What slot k says, see `BlockConfig`; where the publisher leaves it open, the drafts of a text decide."""
        said = self.data.get("sample_from_anchor", self.usual_shift())
        if type(said) is not bool:
            raise refused(self.name, "sample_from_anchor", "true or false", said)
        return said

    def usual_shift(self) -> bool:
        return False

    def says_shift(self) -> bool:
        return "sample_from_anchor" in self.data

    def says_mask(self) -> bool:
        """Whether it is said what slots of sliding layers see."""
        return bool(self.own().get("causal_head")) or self.data.get("is_causal") is not None

    def says_all(self) -> bool:
        """Whether a block says as many tokens as it has slots, else one less."""
        return False

    def correction(self, from_anchor: bool) -> Corrected:
        return None

    def convolution(self) -> tuple[int, int] | None:
        """Taps and group of the layers' convolutions."""
        return None

    def logits_scale(self) -> tuple[float, float]:
        """By what logits are multiplied, and what they stay below, 0 for no bound."""
        return 1.0, 0.0

    def selected(self) -> Selected:
        rank, among = (self.number(field, self.value(field), 1) for field in ("selector_rank", "selector_top_k"))
        return Selected(rank, among)

    def convolved(self) -> tuple[int, int]:
        taps, group = (self.number(field, self.value(field), 1) for field in ("conv_kernel_size", "conv_group_size"))
        if self.layer["hidden_size"] % group:
            expected = f"a number that {self.layer['hidden_size']} is a multiple of"
            raise refused(self.name, "conv_group_size", expected, group)
        return taps, group

    def bigrams(self, from_anchor: bool) -> Bigrams | None:
        rank = self.number("markov_rank", self.own().get("markov_rank", 0), 0)
        kind = self.own().get("markov_head_type", "vanilla")
        if rank and (kind not in MARKOVS or (kind == "rnn" and not from_anchor)):
            known = [name for name in MARKOVS if from_anchor or name != "rnn"]
            raise refused(self.name, "markov_head_type", " or ".join(known), kind)
        return Bigrams(rank, kind) if rank else None

    def number(self, field: str, value: Any, least: int) -> int:
        if type(value) is not int or value < least:
            raise refused(self.name, field, f"a number from {least} on", value)
        return value


def refused(name: str, field: str, expected: str, got: Any) -> BuildError:
    return BuildError(f"drafter: {name}: config.json: {field}: expected {expected}, got {got!r}")

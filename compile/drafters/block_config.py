"""config.json of a block drafter, in each of the formats that they are published in.

| who writes it | how it is known | layer ids | slot k says | a slot sees of its block |
|---|---|---|---|---|
| z-lab (DFlash) | `dflash_config` | t is state t + 1 | token k behind the root | all; sliding layers: to itself |
| JetSpec | `causal_head` in it | the same | the same | to itself |
| SpecForge (DSpark, Domino) | `projector_type` in it | the same | token k + 1; Domino: `shift_label` | all |
| DeepSpec (DSpark) | `target_layer_ids` at the top | t + 1, -1 is 0 | token k + 1 | all |
| speculators | its types dflash and dspark | i is state i | `sample_from_anchor` | `sliding_window_non_causal` |

Hidden states are transformers', see `eagle3_config`. What of this a config does not say itself is taken so, and tried
the other way, too (`try_drafts`). What else such a config may ask for is refused by its name.
"""

from typing import Any

from .block_fields import DFLASH_FIELDS, Bigrams, Layers, Path, Read, ZLab, refused

SPECULATORS = ("dflash", "dspark")
OTHERS = ("dflash2", "domino")  # of the same family, not taken


class _SpecForgeDSpark(ZLab):
    """SpecForge's DSpark: its fields in `dflash_config`, too."""

    fields = DFLASH_FIELDS | {
        "projector_type", "attention_mode", "markov_rank", "markov_head_type", "confidence_head_alpha",
        "confidence_head_with_markov", "enable_confidence_head",
    }  # fmt: skip

    def own(self) -> dict[str, Any]:
        found = super().own()
        if found.get("attention_mode", "gqa") != "gqa":
            raise refused(self.name, "dflash_config.attention_mode", "gqa", found["attention_mode"])
        return found

    def usual_shift(self) -> bool:
        return True

    def says_all(self) -> bool:
        return self.from_anchor()

    def correction(self, from_anchor: bool) -> Bigrams | None:
        return self.bigrams(from_anchor)


class _SpecForgeDomino(ZLab):
    """SpecForge's Domino: its fields in `dflash_config`, too."""

    fields = DFLASH_FIELDS | {"projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"}

    def usual_shift(self) -> bool:
        return bool(self.own().get("shift_label"))

    def says_shift(self) -> bool:
        return super().says_shift() or "shift_label" in self.own()

    def correction(self, from_anchor: bool) -> Path:
        own = self.own()
        inner, memory = (self.number(field, own.get(field), 1) for field in ("emb_dim", "gru_hidden_dim"))
        return Path(inner, memory, self.number("pure_draft_prefix_len", own.get("pure_draft_prefix_len", 0), 0))


class _DeepSpec(ZLab):
    """DeepSpec's DSpark: the same, its own fields at the top."""

    def own(self) -> dict[str, Any]:
        return self.data

    def wide(self) -> int | None:
        return None

    def ids(self) -> Any:
        return self.data.get("target_layer_ids")

    def causal(self, sliding: bool) -> bool:
        if sliding:
            raise refused(self.name, "layer_types", "full_attention alone", "sliding_attention")
        return False

    def usual_shift(self) -> bool:
        return True

    def says_all(self) -> bool:
        return self.from_anchor()

    def correction(self, from_anchor: bool) -> Bigrams | None:
        return self.bigrams(from_anchor)


class _Speculators(ZLab):
    """Types dflash and dspark of speculators: the fields of the layers in `transformer_layer_config`."""

    def inner(self) -> dict[str, Any]:
        inner = self.data.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise refused(self.name, "transformer_layer_config", "the fields of its layers", inner)
        return inner

    def own(self) -> dict[str, Any]:
        if self.data.get("topk_context"):
            raise refused(self.name, "topk_context", "0, attention to all of the text", self.data["topk_context"])
        return self.data

    def wide(self) -> int | None:
        wide: int | None = self.data.get("target_hidden_size")
        return wide

    def feature_layers(self) -> Layers:
        field = "aux_hidden_state_layer_ids"
        return self.hidden_states(field, self.data.get(field), 0)

    def causal(self, sliding: bool) -> bool:
        both_ways = self.data.get("sliding_window_non_causal", False)  # vLLM assumes true, speculators false
        if type(both_ways) is not bool:
            raise refused(self.name, "sliding_window_non_causal", "true or false", both_ways)
        return sliding and not both_ways

    def says_mask(self) -> bool:
        return "sliding_window_non_causal" in self.data

    def usual_shift(self) -> bool:
        return self.data["speculators_model_type"] == "dspark"

    def says_all(self) -> bool:
        return self.from_anchor()

    def correction(self, from_anchor: bool) -> Bigrams | None:
        return self.bigrams(from_anchor) if self.data["speculators_model_type"] == "dspark" else None


PROJECTORS: dict[str, type[ZLab]] = {"dspark": _SpecForgeDSpark, "domino": _SpecForgeDomino}


def is_block_config(data: dict[str, Any]) -> bool:
    """Whether that is the config.json of a block drafter, one that is not taken, too."""
    names = "".join(data.get("architectures") or ())
    kind = data.get("speculators_model_type")
    written = any(name in names for name in ("DFlash", "DSpark", "Domino"))
    return kind in SPECULATORS + OTHERS or "dflash_config" in data or (kind is None and written)


def read_block_config(name: str, data: dict[str, Any], target_hidden: int, target_layers: int) -> Read:
    """What the config.json of a block drafter says, for a target of these sizes: the drafter, and what corrects it.
    Raises BuildError."""
    kind = data.get("speculators_model_type")
    if kind in OTHERS:
        raise refused(name, "speculators_model_type", " or ".join(SPECULATORS), kind)
    nested = data.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise refused(name, "dflash_config", "an object", nested)
    projector = nested.get("projector_type")
    if projector not in (None, *PROJECTORS):
        raise refused(name, "dflash_config.projector_type", f"none or {' or '.join(PROJECTORS)}", projector)
    own = PROJECTORS[projector] if projector else ZLab
    reader = _Speculators if kind else own if "dflash_config" in data else _DeepSpec
    return reader(name, data, target_hidden, target_layers).read()

"""config.json of a block drafter, in each of the formats that they are published in.

| who writes it | how it is known | layer ids | slot k says | a slot sees of its block |
|---|---|---|---|---|
| z-lab (and DFlash2) | `dflash_config` | t is state t + 1 | token k behind the root | all; sliding layers: to itself |
| JetSpec | `causal_head` in it | the same | the same | to itself |
| SpecForge (DSpark, Domino) | `projector_type` in it | the same | token k + 1; Domino: `shift_label` | all |
| DeepSpec (DSpark) | `target_layer_ids` at the top | t + 1, -1 is 0 | token k + 1 | all |
| speculators | its types dflash, dflash2, dspark | i is state i | `sample_from_anchor` | `sliding_window_non_causal` |

z-lab's `is_causal` says of all layers what a slot sees. Hidden states are transformers', see `eagle3_config`. What of
this a config does not say itself is taken so, and tried the other way, too (`settle_readings`). What else such a config
may ask for is refused by its name.
"""

from typing import Any

from .block_fields import DFLASH_FIELDS, Bigrams, Corrected, Layers, PathCorrection, Read, Selected, ZLab, refused

SPECULATORS = ("dflash", "dflash2", "dspark")
OTHERS = ("domino",)  # of the same family, not taken


class _DFlash(ZLab):
    """z-lab's own, and JetSpec."""

    fields = DFLASH_FIELDS | {"output_multiplier", "final_logit_softcapping", "input_embedding_scale"}

    def logits_scale(self) -> tuple[float, float]:
        names = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
        multiplier, softcap, scale = (self._real(name, self.value(name)) for name in names)
        if scale not in (None, 1.0):
            raise refused(self.name, "input_embedding_scale", "1, the target's embeddings as they are", scale)
        return 1.0 if multiplier is None else multiplier, max(softcap or 0.0, 0.0)

    def _real(self, field: str, value: Any) -> float | None:
        if value is None or type(value) in (int, float):
            return None if value is None else float(value)
        raise refused(self.name, field, "a number", value)


class _DFlash2(_DFlash):
    """z-lab's DFlash2, which SpecForge writes, too: convolutions, and a choice among the likeliest tokens."""

    fields = _DFlash.fields | {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}

    def correction(self, from_anchor: bool) -> Selected:
        return self.selected()

    def convolution(self) -> tuple[int, int]:
        return self.convolved()


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

    def correction(self, from_anchor: bool) -> PathCorrection:
        own = self.own()
        inner, memory = (self.number(field, own.get(field), 1) for field in ("emb_dim", "gru_hidden_dim"))
        return PathCorrection(
            inner, memory, self.number("pure_draft_prefix_len", own.get("pure_draft_prefix_len", 0), 0)
        )


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
    """Types dflash, dflash2 and dspark of speculators: the fields of the layers in `transformer_layer_config`."""

    def inner(self) -> dict[str, Any]:
        inner = self.data.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise refused(self.name, "transformer_layer_config", "the fields of its layers", inner)
        return inner

    def logits_scale(self) -> tuple[float, float]:
        for field in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
            if (said := self.data.get(field)) not in (None, 1.0):
                raise refused(self.name, field, "none, as in all that speculators writes", said)
        return super().logits_scale()

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
        # Where it is not said, vLLM assumes true; speculators does so of dflash2 alone.
        both_ways = self.data.get("sliding_window_non_causal", self._second())
        if type(both_ways) is not bool:
            raise refused(self.name, "sliding_window_non_causal", "true or false", both_ways)
        return sliding and not both_ways

    def says_mask(self) -> bool:
        return "sliding_window_non_causal" in self.data

    def usual_shift(self) -> bool:
        return self.data["speculators_model_type"] == "dspark"

    def says_all(self) -> bool:
        return self.from_anchor()

    def correction(self, from_anchor: bool) -> Corrected:
        if self._second():
            return self.selected()
        return self.bigrams(from_anchor) if self.data["speculators_model_type"] == "dspark" else None

    def convolution(self) -> tuple[int, int] | None:
        return self.convolved() if self._second() else None

    def _second(self) -> bool:
        kind: str = self.data["speculators_model_type"]
        return kind == "dflash2"


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
    second = "selector_rank" in nested or "DFlash2" in "".join(data.get("architectures") or ())
    own = PROJECTORS[projector] if projector else _DFlash2 if second else _DFlash
    reader = _Speculators if kind else own if "dflash_config" in data else _DeepSpec
    return reader(name, data, target_hidden, target_layers).read()

"""config.json of an EAGLE-3 head, in each of the formats that heads are published in.

What an id of an auxiliary layer means differs. Everything below is an index of transformers' `hidden_states`: i is the
input of layer i, which is the output of layer i - 1, and the number of layers L is the output of the last one, ahead of
the final norm.

| where the ids are | index of an id i | who writes it so |
|---|---|---|
| nowhere | 2, L // 2, L - 3 | the EAGLE authors; SpecForge, vLLM, SGLang and speculators default to it |
| `eagle_config`, the least id is 1 | i + 1, the output of layer i | ModelOpt, SpecForge: 1, L // 2 - 1, L - 4 |
| `eagle_config`, others | i | NVIDIA's gpt-oss v3 heads, Kimi heads; as SGLang reads them (its pull request 25454) |
| top level | i | speculators and vLLM |
| top level, 1, L // 2 - 1, L - 4 | i + 1 | heads of SpecForge converted to speculators with their ids as they were |
| `target_layer_ids` at the top | i + 1, the output of layer i | DeepSpec: five |
| `feature_layers`; top level, beside `specstep` | i, in the order given | this package |

All but the last are sorted: every other runtime collects the features in the order of the layers. What the ids of all
but the first and the last row mean is taken from who seems to have written them: the build tries the other meaning, one
layer off, too (`settle_readings`). `feature_layers` settles it.
"""

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ...errors import BuildError
from ...graphs.drafters.eagle3 import Eagle3Config

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = "target_layer_ids"  # layers whose outputs are meant
OWN_LAYERS = "feature_layers"  # indices of hidden states, for what no publisher says
LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters",
)  # fmt: skip
SLIDING = "sliding_attention"
KINDS = {SLIDING, "full_attention"}  # of layers
FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual")


def read_config(path: Path, target_hidden: int, target_layers: int, vocabulary: int) -> Eagle3Config:
    """The config of a head for a target of these sizes. Raises BuildError."""
    return config_from(path, json.loads(path.read_text()), target_hidden, target_layers, vocabulary)


def config_from(
    path: Path, data: dict[str, Any], target_hidden: int, target_layers: int, vocabulary: int
) -> Eagle3Config:
    """The same of what the file holds. Raises BuildError."""
    if not isinstance(data.get("eagle_config") or {}, dict):
        raise BuildError(f"drafter: {path}: eagle_config: expected an object or null, got {data['eagle_config']!r}")
    inner = data.get("transformer_layer_config") or data
    wide = data.get("target_hidden_size") or (target_hidden if "target_hidden_size" in data else None)
    layer = layer_config(path, inner, target_hidden, wide)
    size = data.get("draft_vocab_size") or inner.get("vocab_size", vocabulary)
    if type(size) is not int or size < 1:
        raise BuildError(f"drafter: {path}: draft_vocab_size: expected a number of tokens, got {size!r}")
    layers, other = aux_layers(path, data, target_layers)
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=target_hidden,
        feature_layers=layers,
        other_layers=other,
        windows=windows(path, inner, 1),
        **_flags(path, data),
    )


def windows(path: Path, fields: dict[str, Any], layers: int) -> tuple[int, ...]:
    """How many tokens each layer of a head attends to, 0 for all: heads of speculators have windows of 2,048 by default
    since version 0.7. Raises BuildError."""
    said = fields.get("layer_types") or ["full_attention"] * layers
    kinds = said[:layers] if isinstance(said, list) else []  # a target's, which some copy, goes on
    if len(kinds) < layers or not {*map(str, kinds)} <= KINDS:
        known = " or ".join(sorted(KINDS))
        raise BuildError(f"drafter: {path}: layer_types: expected {known} for each of {layers} layers, got {said}")
    slides = [kind == SLIDING and fields.get("use_sliding_window", True) is not False for kind in kinds]
    window: Any = fields.get("sliding_window")
    if any(slides) and (type(window) is not int or window < 1):
        raise BuildError(f"drafter: {path}: sliding_window: expected at least 1 beside {SLIDING}, got {window!r}")
    return tuple(window if slide else 0 for slide in slides)


def window_fields(windows: tuple[int, ...]) -> dict[str, Any]:
    """Fields of a config.json from which `windows` reads these."""
    if not any(windows):
        return {}
    return {
        "layer_types": [SLIDING if window else "full_attention" for window in windows],
        "sliding_window": max(windows),
    }


def layer_config(
    path: Path | str, fields: dict[str, Any], target_hidden: int, head_for: int | None = None
) -> LlamaConfig:
    """The config of a head's one layer, of the fields of its config.json. head_for: the hidden size of the head's
    target, its own by default. Raises BuildError."""
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps")
    missing = [field for field in required if field not in fields]
    if missing:
        raise BuildError(f"drafter: {path}: expected the fields {', '.join(missing)}, got none")
    if fields.get("num_hidden_layers", 1) != 1:
        raise BuildError(f"drafter: {path}: num_hidden_layers: expected 1, got {fields['num_hidden_layers']}")
    expected = fields["hidden_size"] if head_for is None else head_for
    if expected != target_hidden:
        raise BuildError(
            f"drafter: {path}: expected a head for a target of hidden size {target_hidden}, got one for {expected}"
        )
    try:
        return LlamaConfig(**{field: fields[field] for field in LAYER_FIELDS if fields.get(field) is not None})
    except Exception as error:  # transformers raises anything, of its own classes, too
        raise BuildError(f"drafter: {path}: expected the fields of a Llama layer, got {error!r}") from None


def aux_layers(path: Path, data: dict[str, Any], layers: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Indices of the hidden states that a head reads, of a target with so many layers (see above), and what else its
    ids may mean, None where they mean one thing. Raises BuildError."""
    nested = data.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise BuildError(
            f"drafter: {path}: use_aux_hidden_state: expected true, got false; a head over the last hidden state alone "
            "is not supported"
        )
    own, other = data.get(OWN_LAYERS), None
    told = own or nested.get(AUX_LAYERS) or data.get(AUX_LAYERS) or data.get("aux_hidden_state_layer_ids")
    given, name = told or data.get(OUTPUTS), OUTPUTS if data.get(OUTPUTS) and not told else AUX_LAYERS
    ids = given or (2, layers // 2, layers - 3)
    if not isinstance(ids, list | tuple) or not all(type(index) is int for index in ids):
        raise BuildError(f"drafter: {path}: {name}: expected a list of layers, got {ids!r}")
    if "specstep" not in data and not own:
        ids = sorted(ids)
        likely = ids[0] == 1 if nested.get(AUX_LAYERS) else ids == [1, layers // 2 - 1, layers - 4]
        outputs = likely or (given is not None and not told)
        both = (tuple(ids), tuple(index + 1 for index in ids))
        fits = min(both[not outputs]) >= 0 and max(both[not outputs]) <= layers
        ids, other = both[outputs], both[not outputs] if given and fits else None
    if not all(0 <= index <= layers for index in ids):
        raise BuildError(
            f"drafter: {path}: {name}: expected hidden states 0 to {layers} of the target, got "
            f"{', '.join(map(str, ids))} (from {given or 'the default'})"
        )
    return tuple(ids), other


def _flags(path: Path, data: dict[str, Any]) -> dict[str, bool]:
    """The switches of a head's architecture, at the top level or in `eagle_config`, and which of them are left open.
    Raises BuildError."""
    kind = data.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise BuildError(f"drafter: {path}: speculators_model_type: expected eagle3, got {kind}")
    found = (data.get("eagle_config") or {}) | {key: value for key, value in data.items() if value is not None}
    # vLLM assumes true where a config of speculators does not say it, speculators false.
    unsaid = "speculators_model_type" in data and "norm_before_residual" not in found
    # SpecForge writes `norm_output` for a head that it trains with the hidden state ahead of the norm.
    said, normed = found.get("norm_feedback"), bool(found.get("norm_output"))
    feedback = {
        "norm_feedback": normed if said is None else bool(said),
        "feedback_unsaid": normed and said is None and "specstep" not in data,
    }
    return {field: bool(found.get(field)) for field in FLAGS} | {"residual_unsaid": unsaid} | feedback

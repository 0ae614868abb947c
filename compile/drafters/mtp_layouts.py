"""How publishers name modules for multi-token prediction, and what they leave to the code that runs them."""

import re
from collections.abc import Mapping
from typing import NamedTuple


class Layout(NamedTuple):
    """How a publisher names modules."""

    # Pattern of what the names of a module's tensors begin with; LAYER: the number of the target's layers plus the
    # module's own, MODULE: the module's own.
    prefix: str
    # (pattern of the published name, template of ours); what none fits is the layer's own.
    names: tuple[tuple[str, str], ...]
    hidden_first: bool = False  # the projection reads the hidden state ahead of the embedding
    # Of several modules each reads the output of the one before; False: all read the target's hidden state; None:
    # only single ones are published.
    chained: bool | None = None
    normed: bool = True  # the hidden state is the one behind the target's final norm
    layer: Mapping[str, list[str]] = {}  # config fields of the module's layer, where no layer of the target is like it
    # The config field with the types of a module's layers, where it has several, each like one of the target's.
    types: str = ""


LAYOUTS = {
    "DeepSeek-V3, GLM-4.5": Layout(r"model\.layers\.LAYER\.", (
        (r"(enorm|hnorm|embed_tokens)\.weight", r"\1.weight"), (r"eh_proj\.(\w+)", r"proj.\1"),
        (r"shared_head\.norm\.weight", "norm.weight"), (r"shared_head\.head\.weight", "lm_head.weight"),
    ), chained=True),  # transformers' MtpModel runs several so
    "MiMo": Layout(r"(?:model\.)?mtp_layers\.MODULE\.", (
        (r"token_layernorm\.weight", "enorm.weight"), (r"hidden_layernorm\.weight", "hnorm.weight"),
        (r"input_proj\.(\w+)", r"proj.\1"), (r"final_layernorm\.weight", "norm.weight"),
    ), hidden_first=True),
    "MiMo-V2": Layout(r"model\.mtp\.layers\.MODULE\.", (
        (r"(enorm|hnorm)\.weight", r"\1.weight"), (r"eh_proj\.(\w+)", r"proj.\1"),
        (r"final_layernorm\.weight", "norm.weight"),
        (r"pre_mlp_layernorm\.weight", "layer.post_attention_layernorm.weight"),
        (r"self_attn\.attention_sink_bias", "layer.self_attn.sinks"),
    ), chained=False, normed=False,  # as SGLang runs them (mimo_v2_nextn, multi_layer_eagle_worker_v2)
        layer={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}),
    "Ernie 4.5": Layout(r"model\.mtp_(?=[a-z_]+\.MODULE\.)", (
        (r"emb_norm\.\d+\.weight", "enorm.weight"), (r"hidden_norm\.\d+\.weight", "hnorm.weight"),
        (r"linear_proj\.\d+\.(\w+)", r"proj.\1"), (r"block\.\d+\.(.*)", r"layer.\1"),
    )),
    "Qwen3-Next": Layout(r"mtp\.", (
        (r"pre_fc_norm_embedding\.weight", "enorm.weight"), (r"pre_fc_norm_hidden\.weight", "hnorm.weight"),
        (r"fc\.(\w+)", r"proj.\1"), (r"norm\.weight", "norm.weight"), (r"layers\.0\.(.*)", r"layer.\1"),
    )),
    "Nemotron-H": Layout(r"mtp\.layers\.", (
        (r"0\.(enorm|hnorm)\.weight", r"\1.weight"), (r"0\.eh_proj\.(\w+)", r"proj.\1"),
        (r"\d+\.final_layernorm\.weight", "norm.weight"),
    ), types="mtp_layers_block_type"),
}  # fmt: skip
SPECULATORS = LAYOUTS["MiMo"]._replace(hidden_first=False)  # of the type mtp, in a directory of its own
NECESSARY = {"proj.weight", "enorm.weight", "hnorm.weight"}
FURTHER = r"(?:.*\.)?mtp(?:\.layers|_\w+)\.(\d+)\..*"  # numbered modules


def own_name(name: str, layout: Layout, layers: int, module: int = 0) -> str | None:
    """The name that `MtpHead` has for a tensor of the checkpoint; None for one that is not that module's. layers: of
    the target."""
    prefix = layout.prefix.replace("LAYER", str(layers + module)).replace("MODULE", str(module))
    found = re.match(prefix, name)
    if not found:
        return None
    rest = name[found.end() :]
    for pattern, ours in layout.names:
        if match := re.fullmatch(pattern, rest):
            return match.expand(ours)
    return f"layer.{rest}"


def number_of(name: str, layers: int) -> int:
    """Which module a tensor belongs to by its number, -1 for none."""
    if found := re.fullmatch(FURTHER, name):
        return int(found[1])
    found = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return int(found[1]) - layers if found and int(found[1]) >= layers else -1

"""Architectures of GGUF files as transformers' models: the fields of the config, and what becomes of the weights.

To add one: an entry in ARCHITECTURES, and its case in tests/helpers/gguf_cases.py. In llama.cpp, src/models/NAME.cpp
reads the metadata, and conversion/*.py writes the weights.
"""

from collections.abc import Callable
from typing import NamedTuple

from . import families as of
from . import gemma, hybrid, mamba
from . import mixtures as mixed
from .fields import Fields, has
from .file import GgufFile
from .metadata import Metadata
from .recurrent_rules import GRANITE, MAMBA, MAMBA_1, NEMOTRON, QWEN3_5, QWEN3_NEXT
from .rules import (
    CONVOLUTION,
    EXPERTS,
    GPT2,
    GPT_OSS,
    HALVES_OF_HEADS,
    LATENT,
    LLAMA_4,
    NORMS_OF_HEADS,
    ONE_LESS,
    SCORES,
    SHARED_EXPERT,
    Rule,
)


class Architecture(NamedTuple):
    """An architecture of GGUF as a model of transformers."""

    model_type: str  # transformers' name
    # Metadata and file -> config fields beside those that all architectures have.
    fields: Callable[[Metadata, GgufFile], Fields] = lambda metadata, file: {}
    rules: tuple[Rule, ...] = ()  # weights that the file holds in another form than the model
    partial: bool = False  # a part of each head may be rotated alone
    attends: bool = True  # it has attention layers


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", of.llama, (*HALVES_OF_HEADS, *EXPERTS)),
    "llama4": Architecture("llama4_text", mixed.llama4, LLAMA_4),
    "mistral3": Architecture("llama", of.mistral3, (*HALVES_OF_HEADS, *EXPERTS)),
    "deepseek2": Architecture("deepseek_v2", mixed.deepseek2, (*EXPERTS, *LATENT, SCORES), partial=True),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2", of.text_of_images),
    "qwen2moe": Architecture("qwen2_moe", mixed.qwen2moe, (*EXPERTS, SHARED_EXPERT)),
    "qwen3": Architecture("qwen3", lambda metadata, file: {"attention_bias": has(file, "attn_q.bias")}),
    "qwen3vl": Architecture("qwen3", of.text_of_images),
    "qwen3moe": Architecture(
        "qwen3_moe", lambda metadata, file: mixed.sparse(metadata, file) | {"norm_topk_prob": True}, EXPERTS
    ),
    "qwen3next": Architecture("qwen3_next", hybrid.qwen3next, (*QWEN3_NEXT, *EXPERTS, SHARED_EXPERT), partial=True),
    "qwen35": Architecture("qwen3_5_text", hybrid.qwen35, QWEN3_5, partial=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", hybrid.qwen35moe, (*QWEN3_5, *EXPERTS, SHARED_EXPERT), partial=True),
    "gemma": Architecture("gemma", rules=(ONE_LESS,)),
    "gemma2": Architecture("gemma2", gemma.gemma2, (ONE_LESS,)),
    "gemma3": Architecture("gemma3_text", gemma.gemma3, (ONE_LESS,)),
    "gemma3n": Architecture("gemma3n_text", gemma.gemma3n, gemma.GEMMA_3N),
    "gemma4": Architecture("gemma4_text", gemma.gemma4, gemma.GEMMA_4),
    "phi3": Architecture("phi3", of.phi3, partial=True),
    "smollm3": Architecture("smollm3", of.smollm3, HALVES_OF_HEADS),
    "granite": Architecture("granite", of.granite, HALVES_OF_HEADS),
    "granitehybrid": Architecture("granitemoehybrid", hybrid.granitehybrid, (*HALVES_OF_HEADS, *GRANITE, *EXPERTS)),
    "falcon-h1": Architecture("falcon_h1", hybrid.falcon_h1, MAMBA),
    "nemotron_h": Architecture("nemotron_h", hybrid.nemotron_h, NEMOTRON, partial=True),
    "nemotron_h_moe": Architecture("nemotron_h", hybrid.nemotron_h_moe, NEMOTRON, partial=True),
    "mamba": Architecture("mamba", mamba.mamba, MAMBA_1, attends=False),
    "mamba2": Architecture("mamba2", mamba.mamba2, MAMBA, attends=False),
    "jamba": Architecture("jamba", mamba.jamba, (*MAMBA_1, *EXPERTS)),
    "minicpm": Architecture("granite", of.minicpm, HALVES_OF_HEADS),
    "olmo2": Architecture("olmo2", of.olmo2),
    "stablelm": Architecture("stablelm", of.stablelm, NORMS_OF_HEADS, partial=True),
    "starcoder2": Architecture("starcoder2", of.starcoder2),
    "gpt2": Architecture("gpt2", of.gpt2, GPT2),
    "command-r": Architecture("cohere", of.cohere),
    "cohere2": Architecture("cohere2", of.cohere2),
    "glm4": Architecture("glm4", of.glm4, partial=True),
    "exaone": Architecture("llama", of.exaone),
    "exaone4": Architecture("exaone4", of.exaone4),
    "seed_oss": Architecture("seed_oss", of.seed_oss),
    "ernie4_5": Architecture("ernie4_5", of.ernie),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "gpt-oss": Architecture("gpt_oss", mixed.gpt_oss, GPT_OSS),
    "lfm2": Architecture("lfm2", hybrid.lfm2, (CONVOLUTION,)),
    "lfm2moe": Architecture("lfm2_moe", hybrid.lfm2moe, (CONVOLUTION, *EXPERTS, SCORES)),
    "minimax-m2": Architecture("minimax_m2", mixed.minimax, (*EXPERTS, SCORES), partial=True),
}

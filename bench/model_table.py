"""Try every causal LM class of transformers once, small and random, and write docs/models.md.

Heads and routers have the sizes that transformers gives them where nothing is said, which are those of the first model
of that class; the rest is made small.

    python bench/model_table.py            # all of them, 30 minutes on an idle core
    python bench/model_table.py llama opt  # these alone, printed

Each class runs in a process of its own, so that one that dies or hangs stops no other.
"""

import faulthandler
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import specstep
import torch
import transformers
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.source import load_source
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SECONDS, LARGEST, NEW_TOKENS = 900, 700_000_000, 40
PROMPTS = [[3, 9, 4] * 7, [31, 7, 250, 88, 19, 5, 201, 44, 160, 12, 99]]
HEADS, KV_HEADS = 4, 2

# Part of a field's name -> its small value, the first that fits. 0 keeps the default: the sizes of heads, and what a
# router chooses from and how many.
SMALL: list[tuple[str, Any]] = [
    ("vocab_size", 320), ("token_id", 1), ("max_position", 512), ("n_positions", 512), ("n_ctx", 512),
    ("max_window_layers", 0), ("sliding_window", 9), ("attention_window", 9), ("window_size", 9),
    ("q_lora_rank", 24), ("kv_lora_rank", 16), ("head_dim", 0), ("head_size", 0),
    ("key_value_heads", KV_HEADS), ("num_kv_heads", KV_HEADS), ("kv_head", KV_HEADS),
    ("attention_heads", HEADS), ("num_heads", HEADS), ("n_head", HEADS), ("linear_num", 2),
    ("per_tok", 0), ("top_k", 0), ("n_group", 0),
    ("shared_experts", 1), ("experts", 0), ("first_k_dense", 1),
    ("hidden_layers", 3), ("n_layer", 3), ("num_layers", 3), ("encoder_layers", 3),
    ("decoder_layers", 3),
    ("moe_intermediate", 16), ("expert_ffn", 16), ("intermediate", 64), ("ffn", 64), ("n_inner", 64), ("d_ff", 64),
    ("hidden_size_per_layer", 8),
]  # fmt: skip
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_proj_dim", "embedding_size", "emb_dim")
SCALE = ("initializer_range", "init_std")
MISSING = {  # where the default is None
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1, "n_group": 1,
}  # fmt: skip
HYBRID = {"layer_types": ["conv", "full_attention", "conv"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
ALSO: dict[str, dict[str, Any]] = {  # what a class wants besides
    "nemotron": {"num_key_value_heads": 2}, "mamba2": {"num_heads": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma3n_text": {"num_kv_shared_layers": 1}, "lfm2": HYBRID, "lfm2_moe": HYBRID, "lfm3": HYBRID,
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "olmo_hybrid",
         "lara_mini", "kimi_linear", "bailing_hybrid"), LINEAR
    ),
    "granitemoehybrid": LINEAR | {"mamba_n_heads": 8, "mamba_n_groups": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 8},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_head": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 32},
}  # fmt: skip
DECODERS = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": False, "alibi": False}


def has_router(config: PretrainedConfig) -> bool:
    """Whether a model of this config has experts to choose from."""
    fields = {name: MISSING.get(name) if value is None else value for name, value in config.to_dict().items()}
    fields |= ALSO.get(config.model_type, {})
    return any("experts" in name and "shared" not in name and type(value) is int and value > 1
               for name, value in fields.items())  # fmt: skip


def small_config(kind: type[PretrainedConfig], routed_width: int | None = None) -> PretrainedConfig:
    """A config of this class, small but for its heads, and for the width of a model with a router: the default, or
    routed_width."""
    default = kind()
    fields = default.to_dict()
    width, heads = (fields.get(kind.attribute_map.get(name, name)) for name in ("hidden_size", "num_attention_heads"))
    head = fields.get("head_dim") or (width // heads if isinstance(width, int) and heads else 12)
    routed = has_router(default)
    kept = [name for name in fields if routed and not fields.get("head_dim") and "heads" in name]
    width = (routed_width or width) if routed and isinstance(width, int) else HEADS * head
    if kept and heads:  # they share the width, each an even part of it
        width += -width % (2 * heads)
    changes = {"head_dim": head} if "head_dim" in fields else {}
    for name, value in fields.items():
        if name in kind.sub_configs:
            inner = type(getattr(default, name))
            changes[name] = None if value is None else small_config(inner, routed_width)
        elif name in DECODERS and isinstance(value, bool):
            changes[name] = DECODERS[name]
        elif value is None and name in MISSING:
            changes[name] = MISSING[name]
        elif name in WIDTH and type(value) is int:
            changes[name] = width
        elif name in SCALE:
            changes[name] = 2 * width**-0.5
        elif type(value) in (int, float) and name not in kept:
            small = next((small for part, small in SMALL if part in name), 0)
            changes |= {name: small} if small and type(small) is type(value) else {}
    if "qk_rope_head_dim" in fields and "num_key_value_heads" in changes:  # latent attention: a key head for each
        changes["num_key_value_heads"] = HEADS
    return kind(**changes | ALSO.get(kind.model_type, {}))


def small_model(model_type: str) -> Any:
    """A random float32 model. Raises whatever transformers raises, or ValueError if it is not small."""
    config = small_config(CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters, this script knows no smaller config")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 1}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
    return list(out[0, len(prompt) :].tolist())


@torch.no_grad()
def greedy_without_cache(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def attempt(model_type: str) -> str:
    """One class: its cell in the table."""
    try:
        model = small_model(model_type)
    except Exception as error:
        return f"not tried: {line(error)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = [greedy(model, prompt) for prompt in PROMPTS]
            failed = ""
        except Exception as error:
            failed = f"not tried: {line(error)}"
        try:
            model.save_pretrained(folder)
            engine = specstep.eager(folder, dtype="float32", max_seq_len=128, drafter="ngram", nodes=6)
            got = [engine.generate(prompt, NEW_TOKENS, ignore_eos=True).token_ids for prompt in PROMPTS]
            trace(folder)
        except specstep.BuildError as error:
            refusal = str(error).removeprefix("model: ").replace(f"{folder}: ", "")
            return failed if failed and "traced" in refusal else f"refused: {refusal}"
        except Exception as error:
            return failed or f"DEFECT: {line(error)}"
    if failed or got == expected:
        return failed or "works"
    if got == [greedy_without_cache(model, prompt) for prompt in PROMPTS]:
        return "works: text as transformers' forward pass has it without a cache; its own cache changes the text"
    return "DEFECT: other text than transformers"


def trace(folder: str) -> None:
    """Export the programs of an engine, as a build does. Raises BuildError."""
    config = make_config({"dtype": "float32", "max_seq_len": 128, "drafter": "ngram", "nodes": 6})
    assembled = assemble(load_source(folder, "float32", "cpu"), config)
    for program in assembled.programs.values():
        export_program(program, assembled.spec)


def line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"


def child(model_type: str, pipe: Any) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        pipe.send(attempt(model_type))


def results(model_types: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(model type, class, cell) of each."""
    context = multiprocessing.get_context("fork")
    for model_type in model_types:
        ours, theirs = context.Pipe()
        process = context.Process(target=child, args=(model_type, theirs))
        process.start()
        process.join(0 if ours.poll(SECONDS) else 1)
        cell = ours.recv() if ours.poll() else f"not tried: no answer in {SECONDS} s"
        process.kill()
        process.join()
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        print(f"{model_type:28} {name:36} {cell}", flush=True)
        yield model_type, name, cell


def page(rows: list[tuple[str, str, str]]) -> str:
    counts = Counter(cell.split(":")[0] for _, _, cell in rows)
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    head = f"""# Models

Every causal LM class of transformers {transformers.__version__}, tried once: a small random model in float32, through
the eager engine with the drafter `ngram` and a tree, and traced as a build does. Its heads, its experts and the width
of its router have the sizes that transformers gives the class where nothing is said; its layers, vocabulary and
feed-forward parts are small.

- **works**: {NEW_TOKENS} greedy tokens equal those of transformers, past a small sliding window where there is one.
- **refused**: `build` ends with this line.
- **not tried**: transformers itself does not build or run the small model that the script makes.

A real checkpoint gets the same comparison, of logits in float32, when an engine is built from it.

{summary}. Written by `python bench/model_table.py`;
run it again after an upgrade of transformers.

| model type | class | result |
|---|---|---|
"""
    cells = (cell.replace("|", "\\|") for _, _, cell in rows)
    return head + "".join(f"| {kind} | {name} | {cell} |\n" for (kind, name, _), cell in zip(rows, cells, strict=True))


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = list(results(sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)))
    if not sys.argv[1:]:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()

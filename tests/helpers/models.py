"""Tiny random models of every architecture we promise, and a tiny tokenizer."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from specstep.graphs.target import body
from specstep.runtime.text.channels import CALL, SHOWN
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 320

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # wide, so that logits differ clearly between tokens
    "tie_word_embeddings": False,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
PER_LAYER = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "initializer_range": 0.3,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8, "head_dim": 16,
}  # fmt: skip
MAMBA_1 = {"intermediate_size": 96, "state_size": 10, "conv_kernel": 4, "expand": 2, "time_step_rank": 5}
MAMBA = {"mamba_chunk_size": 8, "mamba_d_conv": 4, "mamba_expand": 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Qwen2": SMALL | WINDOWS | {"use_sliding_window": True, "max_window_layers": 0},
    "Qwen3": SMALL | {"head_dim": 16},
    "Mistral": SMALL | {"sliding_window": 9},
    "Phi3": SMALL | {"sliding_window": 9},
    "Gemma2": SMALL | WINDOWS | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Gemma3Text": SMALL | WINDOWS | {"head_dim": 16, "query_pre_attn_scalar": 16},
    "Gemma3nText": SMALL  # the last layer attends to the keys of the first
    | WINDOWS
    | PER_LAYER
    | {"head_dim": 16, "laurel_rank": 8, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.9, 0.0, 0.5]},
    "Gemma4Text": SMALL
    | PER_LAYER
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 9, "head_dim": 16}
    | {"global_head_dim": 24, "use_double_wide_mlp": True},
    "Olmo": SMALL,
    "SmolLM3": SMALL,
    "GPT2": GPT2,
    "Qwen3Moe": SMALL | MIXTURE,
    "DeepseekV3": SMALL | LATENT,
    "GptOss": SMALL | WINDOWS | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": SMALL | CONVOLUTIONS | {"conv_bias": True, "conv_L_cache": 4},
    "Lfm2Moe": SMALL
    | CONVOLUTIONS
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    "Qwen3Next": SMALL | MIXTURE | LINEAR | {"shared_expert_intermediate_size": 32},
    "Qwen3_5Text": SMALL | LINEAR,
    "OlmoHybrid": SMALL | LINEAR,
    "GraniteMoeHybrid": SMALL
    | MAMBA
    | {
        "layer_types": LINEAR["layer_types"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "attention_multiplier": 0.25,
        "position_embedding_type": "rope",
    },
    "Bamba": SMALL | MAMBA | {"attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_n_groups": 2, "mamba_d_state": 10},
    "FalconH1": SMALL
    | MAMBA
    | {"mamba_n_heads": 12, "mamba_d_ssm": 96, "mamba_d_state": 10, "mamba_d_head": 8, "head_dim": 16},
    "NemotronH": SMALL
    | {
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 12,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 10,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "KimiLinear": SMALL
    | {name: value for name, value in LATENT.items() if name != "n_routed_experts"}
    | {"layer_types": LINEAR["layer_types"], "linear_num_heads": 3, "linear_head_dim": 12, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "Zamba2": SMALL
    | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "n_mamba_heads": 12, "chunk_size": 8}
    | {"mamba_ngroups": 2, "mamba_d_state": 10, "use_mem_rope": True, "adapter_rank": 8, "num_key_value_heads": 4},
    "Mamba": SMALL | MAMBA_1,
    "FalconMamba": SMALL | MAMBA_1,
    "Jamba": SMALL
    | {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_expand": 2}
    | {"mamba_dt_rank": 5},
    "MiniMax": SMALL
    | {"layer_types": LINEAR["layer_types"], "head_dim": 16, "block_size": 8, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "linear_attn_alpha_factor": 1.3, "linear_attn_beta_factor": 0.7},
    "Llama4Text": SMALL  # experts in the second layer, no positions in the third
    | {"head_dim": 12, "intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    | {"no_rope_layer_interval": 3},
    "StableLm": SMALL  # its layers hand no keyword arguments on
    | {"use_qkv_bias": True, "qk_layernorm": True}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "Rwkv": SMALL | {"rescale_every": 2},
    "Mamba2": SMALL
    | {"num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 10, "chunk_size": 8, "conv_kernel": 4, "expand": 2},
}

# Whose recurrent layers are those of another one: the slow tests have them.
ALIKE = ["FalconMamba", "Mamba", "Zamba2", "KimiLinear"]


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model of an architecture in ARCHITECTURES, or of one that needs no more than SMALL."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**(ARCHITECTURES.get(architecture, SMALL) | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # of experts, which start as zeros: leaving them out would not show
            torch.nn.init.normal_(parameter, std=0.3)
        if name.endswith("A_log") and parameter.dim() == 2:  # of Mamba, the same for all channels at the start
            parameter.data += torch.randn_like(parameter)
    return model


def final_norm(model: PreTrainedModel) -> torch.nn.Module:
    """What a tiny model does to its last hidden state ahead of its head."""
    names = {
        "gpt2": "ln_f", "lfm2": "embedding_norm", "lfm2_moe": "embedding_norm", "bamba": "final_layernorm",
        "falcon_h1": "final_layernorm", "nemotron_h": "norm_f", "mamba2": "norm_f", "mamba": "norm_f",
        "falcon_mamba": "norm_f", "jamba": "final_layernorm", "zamba2": "final_layernorm",
    }  # fmt: skip
    return getattr(body(model), names.get(model.config.model_type, "norm"))


def save_model(
    folder: Path, architecture: str = "Llama", tokenizer: bool = False, seed: int = 0, **changes: Any
) -> Path:
    """Write a tiny model as an HF directory."""
    tiny_model(architecture, seed, **changes).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token per byte, with a chat template; ids 0 and 1 are <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}bot:"
    return fast


def pieces_tokenizer(without: str = "", seed: int = 0) -> PreTrainedTokenizerFast:
    """SentencePiece's kind: a token per letter and per byte, ids in a random order, none for the letters `without`."""
    letters = [chr(code) for code in range(97, 123)] + ["\u2581"]
    gone = {f"<0x{ord(letter):02X}>" for letter in without} | {*without.replace(" ", "\u2581")}
    words = {"<unk>", "<s>", "</s>", *letters, *(f"<0x{byte:02X}>" for byte in range(256))} - gone
    order = random.Random(seed).sample(sorted(words), len(words))
    vocabulary = {word: index for index, word in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


CHANNEL_IDS = {mark: 258 + number for number, mark in enumerate(SHOWN)}  # behind the bytes of `tiny_tokenizer`


def save_channel_model(folder: Path, template: str) -> Path:
    """Write a tiny model with gpt-oss' marks as special tokens, of which one ends a call."""
    save_model(folder, max_position_embeddings=2048, eos_token_id=[1, CHANNEL_IDS[CALL]])
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SHOWN)})
    assert tokenizer.convert_tokens_to_ids(list(CHANNEL_IDS)) == list(CHANNEL_IDS.values())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def token_of(char: str) -> int:
    """The token of an ASCII character in `tiny_tokenizer`."""
    return int(tiny_tokenizer().convert_tokens_to_ids("Ġ" if char == " " else char))


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, stop_ids: list[int] | None = None) -> list[int]:
    """transformers' own greedy continuation, the stop token included."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=stop_ids or None,
        pad_token_id=1,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def logit_gap(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """How far from greedy tokens are, judged by the model in float32: the largest gap to the most probable token, in
    standard deviations of the logits. Other tokens than the greedy ones are about 5 off, rounding in bfloat16 0.1."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((gaps / logits.std(-1)).max())


def save_eagle3(folder: Path, target_hidden: int = 48, seed: int = 0, features: int = 3, **changes: Any) -> Path:
    """Write a random EAGLE-3 head for a tiny target, in the published format; which hidden states it reads is said in
    our own words, so that no build tries others, unless ids of layers are among the changes."""
    ids = "eagle_aux_hidden_state_layer_ids"
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": target_hidden,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": 100,
        **({} if ids in changes else {"feature_layers": [0, 1, 2]}),
    } | changes
    torch.manual_seed(seed)
    size, draft, head = config["hidden_size"], config["draft_vocab_size"], config["hidden_size"] // 4
    shapes = {
        "fc.weight": (size, features * target_hidden),
        "midlayer.self_attn.q_proj.weight": (4 * head, 2 * size),
        "midlayer.self_attn.k_proj.weight": (2 * head, 2 * size),
        "midlayer.self_attn.v_proj.weight": (2 * head, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, 4 * head),
        "midlayer.mlp.gate_proj.weight": (64, size),
        "midlayer.mlp.up_proj.weight": (64, size),
        "midlayer.mlp.down_proj.weight": (size, 64),
        "lm_head.weight": (draft, size),
    }
    norms = ["norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"]
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.1 * torch.randn(size) for name in norms}
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": 1 + 0.1 * torch.randn(target_hidden) for index in range(3)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + 0.1 * torch.randn(features * target_hidden)
    tensors["d2t"] = torch.randperm(VOCABULARY)[:draft].sort().values - torch.arange(draft)
    tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, tensors["d2t"] + torch.arange(draft), True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_eagle3_for(folder: Path, model: PreTrainedModel, seed: int = 0) -> Path:
    """Write a random EAGLE-3 head for a real model, through our own module's shapes."""
    from specstep.compile.drafters.eagle3_config import read_config
    from specstep.graphs.drafters.eagle3 import Eagle3Head

    config = {
        "hidden_size": model.config.hidden_size, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "draft_vocab_size": 2000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    layers, vocabulary = model.config.num_hidden_layers, model.config.vocab_size
    head = Eagle3Head(read_config(folder / "config.json", model.config.hidden_size, layers, vocabulary))
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder

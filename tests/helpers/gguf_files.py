"""Small GGUF files, written with gguf's own writer."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from torch import Tensor

Tensors = dict[str, Tensor]


def write_gguf(
    path: Path, architecture: str, keys: dict[str, Any], tensors: Tensors, *, tokenizer: bool = True,
    whole: dict[str, Any] | None = None, **options: Any
) -> Path:  # fmt: skip
    """Write a file. keys: without the architecture's name ahead. whole: keys with their whole names. options: of
    gguf.GGUFWriter."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    words = byte_words() if tokenizer else {}
    for key, value in ({f"{architecture}.{key}": value for key, value in keys.items()} | words | (whole or {})).items():
        add_key(writer, key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def byte_words(count: int = 320) -> dict[str, Any]:
    """A tokenizer of one token per byte; ids 0 and 1 begin and end a text. Unused ones fill it up to `count`."""
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    unused = [f"[PAD{id}]" for id in range(len(tokens), count)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [3, 3, *[1] * 257, *[5] * len(unused)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }

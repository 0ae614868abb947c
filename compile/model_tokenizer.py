"""Loads the tokenizer that lies beside a model."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..errors import BuildError
from .json_object import read_object
from .tokenizer_files import FAST, NO_CODE, keep_to_file, read_tokenizer_files


def reason_of(error: Exception) -> str:
    """What a loader's error says, in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "trust_remote_code" in str(error):
        return "one with code of its own, which is never run; take a model of transformers' own architectures"
    return f"{type(error).__name__}: {lines[0]}"


def tokenizer_in(location: str) -> Any:
    """The fast tokenizer beside the model, or None: an engine without one takes token ids only."""
    folder = Path(location)
    if folder.is_dir() and not (folder / FAST).is_file():
        return read_tokenizer_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, use_fast=True, **NO_CODE)
    except Exception as error:  # loaders raise anything
        raise BuildError(f"model: {location}: expected a fast tokenizer, got {reason_of(error)}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):  # Mistral's own, where its package is installed
        raise BuildError(f"model: {location}: expected a fast tokenizer, got {type(tokenizer).__name__}")
    if folder.is_dir():
        keep_to_file(tokenizer, folder)
    template = folder / "chat_template.json"  # of models whose processor has it
    if tokenizer.chat_template is None and template.is_file():
        tokenizer.chat_template = read_object(template).get("chat_template")
    return tokenizer

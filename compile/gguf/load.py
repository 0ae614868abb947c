"""A model and its tokenizer from a GGUF file."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ...errors import BuildError
from ..on_disk import Keep, in_memory
from .architectures import ARCHITECTURES, Architecture
from .fields import EPSILONS, attention_fields, sizes
from .file import GgufFile, read_gguf
from .metadata import Metadata
from .rope import divide_frequencies
from .special_tokens import SpecialTokens
from .tokenizer import read_tokenizer
from .weights import read_weights

# What the file recommends, by the names of the generation config.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}  # fmt: skip


def load_gguf(path: Path, dtype: torch.dtype, keep: Keep = in_memory) -> tuple[PreTrainedModel, Any]:
    """The model on the CPU in a dtype, and its tokenizer, None where the file has none. keep: says where a widened
    weight lies. Raises BuildError for what is not known, naming it."""
    file = read_gguf(path)
    metadata = Metadata(file, path.name)
    architecture = _architecture(metadata)
    tokenizer, special = read_tokenizer(metadata, _rows(file, metadata))
    own = architecture.fields(metadata, file)
    fields = sizes(metadata, file, own)
    fields |= attention_fields(metadata, file, own, architecture.partial) if architecture.attends else {}
    fields |= {"model_type": architecture.model_type} | own
    ids = {"bos_token_id": special.ids.get("bos"), "pad_token_id": special.ids.get("padding")}
    config = _config(metadata, fields | ids | {"eos_token_id": list(special.stop) or None})
    _check_norms(metadata, fields, config)
    _check_kept(metadata, fields, config)
    generation = _generation(metadata, special)
    metadata.check_all_used()
    with no_init_weights():  # memory that is not written is not there yet
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    divide_frequencies(model, file)
    read_weights(model, config, file, metadata, architecture, fields["num_hidden_layers"], keep)
    model.generation_config = generation
    return model, tokenizer


def load_gguf_tokenizer(path: Path) -> tuple[Any, int]:
    """The tokenizer alone, None where the file has none, and the size of the vocabulary. Raises BuildError."""
    file = read_gguf(path)
    metadata = Metadata(file, path.name)
    rows = _rows(file, metadata)
    return read_tokenizer(metadata, rows)[0], rows


def _architecture(metadata: Metadata) -> Architecture:
    found = ARCHITECTURES.get(metadata.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise BuildError(
            f"model: {metadata.name}: general.architecture: expected one of {known}, got {metadata.architecture}"
        )
    return found


def _config(metadata: Metadata, fields: dict[str, Any]) -> Any:
    try:
        return AutoConfig.for_model(**fields)
    except (ValueError, StrictDataclassError) as error:  # sizes that do not go together
        reason = str(error).splitlines()[-1].strip()
        raise BuildError(f"model: {metadata.name}: expected what transformers takes, got {reason}") from error


def _check_norms(metadata: Metadata, fields: dict[str, Any], config: Any) -> None:
    """Refuse a file without the epsilon of its norms: transformers would have its own. Raises BuildError."""
    for field, key in EPSILONS.items():
        if hasattr(config, field) and field not in fields:
            metadata.need(key)


def _check_kept(metadata: Metadata, fields: dict[str, Any], config: Any) -> None:
    """Refuse a config that took a field for another, as one with a rope for each kind of layer takes a single one."""
    written = config.to_dict()
    for name, value in fields.items():
        got = written[name] if name in written else getattr(config, name, None)
        kept = _holds(got, value) if isinstance(value, dict) else got == value
        if not kept:
            raise BuildError(f"model: {metadata.name}: {name}: expected {value} in transformers' config, got {got}")


def _holds(got: Any, given: dict[str, Any]) -> bool:
    return isinstance(got, dict) and all(
        _holds(got.get(name), value) if isinstance(value, dict) else got.get(name) == value
        for name, value in given.items()
    )


def _rows(file: GgufFile, metadata: Metadata) -> int:
    if "token_embd.weight" not in file.tensors:
        raise BuildError(f"model: {metadata.name}: expected all weights, got none for token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _generation(metadata: Metadata, special: SpecialTokens) -> GenerationConfig:
    found = {name: metadata.values.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    found["suppress_tokens"] = metadata.get("tokenizer.ggml.suppress_tokens")
    given = {name: value for name, value in found.items() if value is not None}
    samples = bool(given.keys() - {"repetition_penalty", "suppress_tokens"})
    return GenerationConfig(
        bos_token_id=special.ids.get("bos"),
        eos_token_id=list(special.stop) or None,
        pad_token_id=special.ids.get("padding"),
        do_sample=samples,
        **given,
    )

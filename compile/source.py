"""Where models come from: a Hugging Face directory or a GGUF file, here or on the hub, or the default model."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from ..backends import BACKENDS
from ..errors import BuildError, InputError
from ..runtime.asked.sampling_params import SamplingParams
from .adapter import base_of, merge_adapter
from .checkpoint import check_all_taken
from .gguf import blocks
from .gguf.load import load_gguf, load_gguf_tokenizer
from .hub import here
from .kept_groups import KeptWeight
from .locate import holds_both, is_adapter, local
from .model_tokenizer import reason_of, tokenizer_in
from .on_disk import Keep, OnDisk, in_memory
from .quantized.checkpoint import (
    WIDENED_BY_TRANSFORMERS,
    Quantized,
    holds_blocks,
    quantized,
    values,
    widened_weights,
)
from .quantized.checkpoint import kept_weights as kept_in_directory
from .tokenizer_files import NO_CODE

logger = logging.getLogger(__name__)
TEXT_ALONE = ("gemma3n",)  # transformers would want a package more for its images


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer, as loaded. `tokenizer` is transformers' own, None where the model has none. adapter:
    what was merged into the model. disk: where weights lie that are larger than their file."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    adapter: str | None = None
    disk: OnDisk | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids, those of the generation config first."""
        for config in (self.model.generation_config, self.model.config.get_text_config()):
            ids = getattr(config, "eos_token_id", None)
            if ids is not None:
                return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
        return ()

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that the generation config recommends: none for greedy. What it leaves open, as
        top_k, asks for nothing; transformers' own defaults are not the model's."""
        config = self.model.generation_config
        names = ("top_k", "top_p", "min_p") if getattr(config, "do_sample", False) else ()
        found = {name: getattr(config, name, None) for name in (*names, "repetition_penalty", "suppress_tokens")}
        if names:
            found["temperature"] = 1.0 if config.temperature is None else config.temperature
        try:
            return SamplingParams.of(found).changed
        except InputError as error:
            logger.warning("generation config: its sampling is left out: %s", error)
            return {}


def load_source(name: str, dtype: str, device: str, adapter: str | None = None, disk: OnDisk | None = None) -> Source:
    """Load weights and tokenizer. name: as `locate` takes it; a directory with an adapter names its model. adapter: a
    directory with another one. disk: where weights go that are larger than their file. Raises BuildError."""
    _check_place(dtype, device)
    path = local(name)
    if is_adapter(path):
        if adapter is not None:
            raise BuildError(f"adapter: expected a model and one adapter, got {adapter} on {name}, which is one itself")
        return load_source(_beside(path, base_of(path)), dtype, device, name, disk)
    if holds_both(path):
        raise BuildError(
            f"model: {name}: expected a model or an adapter, got both; give one of them, in a directory of its own"
        )
    keep = disk.keep if disk else in_memory
    with _quiet():
        if path.is_file():
            model, tokenizer = load_gguf(path, getattr(torch, dtype), keep)
        else:
            model, tokenizer = _load_directory(name, path, dtype, keep), tokenizer_in(str(path))
        if adapter is not None:
            merged = Path(here(adapter)).expanduser()
            merge_adapter(model, merged)
            tokenizer = tokenizer_in(str(merged)) or tokenizer  # one that was trained with a template has it
        return Source(name, model.to(device).eval(), tokenizer, adapter, disk)


def _beside(adapter: Path, base: str) -> str:
    """The name of an adapter's model: a relative path is one from here, or from where the adapter lies."""
    near = adapter.parent / base
    return str(near) if not Path(base).exists() and near.is_dir() else base


def _load_directory(name: str, folder: Path, dtype: str, keep: Keep) -> PreTrainedModel:
    """A model in transformers' own files. keep: says where a widened weight lies."""
    found, kind = quantized(name, folder), getattr(torch, dtype)
    try:
        config = _config(folder)
        options: dict[str, Any] = {"dtype": kind, "output_loading_info": True, "config": config}
        if found is not None:
            model, loaded = _load_widened(found, options, keep)
        else:
            model, loaded = AutoModelForCausalLM.from_pretrained(str(folder), **options, **NO_CODE)
    except BuildError:
        raise
    except Exception as error:  # loaders raise anything
        raise BuildError(f"model: {name}: expected a causal language model, got {reason_of(error)}") from error
    if missing := sorted(loaded["missing_keys"]):  # transformers fills them with random numbers
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BuildError(f"model: {name}: expected all weights, got none for {', '.join(missing[:3])}{more}")
    check_all_taken(name, model, loaded["unexpected_keys"])
    return model


def _config(folder: Path) -> PreTrainedConfig:
    """A model's config, that of its language model where it is loaded alone."""
    config = AutoConfig.from_pretrained(str(folder), **NO_CODE)
    text: PreTrainedConfig = config.get_text_config() if config.model_type in TEXT_ALONE else config
    own = getattr(text, "quantization_config", None)
    if isinstance(own, dict) and own.get("quant_method") in WIDENED_BY_TRANSFORMERS:
        text.quantization_config = own | {"dequantize": True}  # beside a GPU it would quantise activations
    return text


def _load_widened(found: Quantized, options: dict[str, Any], keep: Keep) -> Any:
    """Have transformers load a quantised checkpoint as if it were of a dtype. Raises BuildError."""
    config = options["config"]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    state = dict(found.others()) | {name: keep(values(weight, options["dtype"])) for name, weight in found.weights()}
    model, loaded = kind.from_pretrained(None, state_dict=state, **options)
    for parameter in model.parameters():  # experts were stacked, into memory
        parameter.data = keep(parameter.data)
    if (found.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(found.folder))
    return model, loaded


def _check_place(dtype: str, device: str) -> None:
    """Refuse what no model can be loaded in, or to. Raises BuildError."""
    known = BACKENDS["inductor"]
    for field, got, names in (("dtype", dtype, known.dtypes), ("device", device, known.devices)):
        if got not in names:
            raise BuildError(f"{field}: expected one of {', '.join(names)}, got {got}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BuildError("device: expected cpu, got cuda on a machine without a usable NVIDIA GPU")


def quantized_file(name: str) -> Path | None:
    """The GGUF file, or the directory with quantised weights, that a model's name stands for; None for another kind of
    model, or none at all."""
    try:
        path = local(name)
        held = path.is_file() or quantized(name, path) is not None or holds_blocks(path)
    except BuildError:
        return None
    return path if held else None


def kept_weights(file: Path) -> list[KeptWeight]:
    """The weights of a `quantized_file` that our kernels multiply with as they are."""
    return blocks.kept_weights(file) if file.is_file() else kept_in_directory(file)


def widened_tensors(file: Path) -> dict[str, list[str]]:
    """The other quantised weights of it: their names by type."""
    return blocks.widened_tensors(file) if file.is_file() else widened_weights(file)


def load_tokenizer(name: str) -> tuple[Any, int]:
    """A model's tokenizer, None where it has none, and the size of its vocabulary, without its weights. Raises
    BuildError."""
    path = local(name)
    if is_adapter(path):
        tokenizer, size = load_tokenizer(_beside(path, base_of(path)))
        return tokenizer_in(str(path)) or tokenizer, size
    with _quiet():
        if path.is_file():
            return load_gguf_tokenizer(path)
        try:
            config = AutoConfig.from_pretrained(str(path), **NO_CODE)
        except Exception as error:  # loaders raise anything
            raise BuildError(f"model: {name}: expected a causal language model, got {reason_of(error)}") from error
        return tokenizer_in(str(path)), config.get_text_config().vocab_size


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the loaders' messages and progress bars; the settings of the process come back when the block ends."""
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
        hub_logging.set_verbosity(hub_verbosity)
        transformers_logging.set_verbosity(verbosity)


def model_summary(source: Source) -> dict[str, Any]:
    """For people and `inspect`: what the model is."""
    parameters = sum(p.numel() for p in source.model.parameters())
    config = json.loads(source.model.config.to_json_string(use_diff=False))
    kept = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    merged = {} if source.adapter is None else {"adapter": source.adapter}
    return (
        {"name": source.name, "parameters": parameters} | merged | {key: config[key] for key in kept if key in config}
    )

"""The weights of a model, read from a GGUF file one after the other, in the model's own dtype."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gguf
import torch
from gguf.constants import MODEL_ARCH_NAMES
from torch import Tensor, nn

from ...errors import BuildError
from ..heap import give_back
from ..on_disk import Keep
from .architectures import Architecture
from .blocks import wide_values
from .file import GgufFile, GgufTensor
from .metadata import Metadata

VALUES = 2**20  # widened at once, to float32: for more, the system gives new memory, which is slow
LARGE = 2**22  # elements of a weight, whose parts leave the heap in pieces
# Tensors that change no logit, and why.
HARMLESS = (
    r"blk\.\d+\.attn_rot_embd\.weight",  # frequencies that follow from the metadata
    r"rope_freqs\.weight",  # used by `divide_frequencies`, which refuses what does not fit
    r"rope_factors_(long|short)\.weight",  # in the config
)


def read_weights(
    model: nn.Module,
    config: Any,
    file: GgufFile,
    metadata: Metadata,
    architecture: Architecture,
    layers: int,
    keep: Keep,
) -> None:
    """Fill every parameter and buffer that a checkpoint holds. layers: of the model; those behind them in the file
    draft. keep: says where a weight lies. Raises BuildError for a tensor that is missing, of another shape, or that
    nothing takes."""
    names = _names(metadata.architecture, layers)
    held = {name for name, _ in model.named_parameters()}
    persistent = dict(model.state_dict(keep_vars=True))
    used: set[str] = set()
    for name, parameter in persistent.items():
        if isinstance(parameter, nn.Parameter) and name not in held:
            continue  # tied: it has the name of the first
        sources, make, exact = _sources(architecture, names, name, file)
        if all(source not in file.tensors for source in sources) and name.endswith(".bias"):
            parameter.data = torch.zeros_like(parameter)  # of a layer whose siblings have one
            continue
        kind = torch.float32 if exact else parameter.dtype
        parts = {source: _values(file, metadata, source, kind) for source in sources}
        parameter.data = keep(_made(partial(make, config), parts, name, parameter, metadata))
        file.release()
        if parameter.numel() >= LARGE:
            give_back()
        used.update(sources)
    _check_all_used(file, metadata, used, layers)


def _made(
    make: Callable[..., Tensor], parts: Mapping[str, Tensor], name: str, parameter: Tensor, metadata: Metadata
) -> Tensor:
    """What a parameter is made to be of tensors of the file. Raises BuildError."""
    sources = ", ".join(parts)
    try:
        value = make(*parts.values()).to(parameter.dtype)
    except RuntimeError as error:  # parts that cannot be cut or joined so
        shapes = ", ".join(str(tuple(part.shape)) for part in parts.values())
        raise BuildError(f"model: {metadata.name}: {sources}: expected what makes {name}, got {shapes}") from error
    except ValueError as error:  # numbers that cannot be what they are for
        raise BuildError(f"model: {metadata.name}: {sources}: {error}") from error
    if value.shape != parameter.shape:
        raise BuildError(
            f"model: {metadata.name}: {sources}: expected shape {tuple(parameter.shape)} for {name}, "
            f"got {tuple(value.shape)}"
        )
    return value.contiguous()


def _names(architecture: str, layers: int) -> gguf.TensorNameMap:
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers)


def _sources(
    architecture: Architecture, names: gguf.TensorNameMap, name: str, file: GgufFile
) -> tuple[list[str], Any, bool]:
    """The file's tensors for a parameter, what makes one of them, and whether in float32."""
    found = [
        ([match.expand(source) for source in rule.sources] or [_named(names, name)], rule.make, rule.exact)
        for rule in architecture.rules
        if (match := re.fullmatch(rule.pattern, name))
    ]
    there = [each for each in found if file.tensors.keys() >= {*each[0]}]
    return [*there, *found, ([_named(names, name)], lambda config, weight: weight, False)][0]


def _named(names: gguf.TensorNameMap, name: str) -> str:
    published = name.replace("model.", "backbone.", 1)  # Nemotron H, whose layers the table knows by that name
    each = (names.get_name(known, try_suffixes=(".weight", ".bias")) for known in (name, published))
    found = next(filter(None, each), None)
    return found or f"no tensor for {name}"


def _values(file: GgufFile, metadata: Metadata, source: str, dtype: torch.dtype) -> Tensor:
    if source not in file.tensors:
        raise BuildError(f"model: {metadata.name}: expected all weights, got none for {source}")
    return widened(file.tensors[source], dtype)


def widened(tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """The values of a tensor. A part of it at a time is in float32."""
    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    found = torch.empty(len(rows), tensor.shape[-1] if tensor.shape else 1, dtype=dtype)
    step = max(1, VALUES // max(1, found.shape[1]))
    for at in range(0, len(rows), step):
        factors = None if tensor.factors is None else tensor.factors[at : at + step]
        part = tensor._replace(data=rows[at : at + step], factors=factors)
        found[at : at + step] = wide_values(part, exact=dtype == torch.float32)
    return found.reshape(tensor.shape)


def _check_all_used(file: GgufFile, metadata: Metadata, used: set[str], layers: int) -> None:
    drafts = rf"blk\.(?!(?:{'|'.join(map(str, range(layers)))})\.)\d+\..*"  # a drafter in the file
    sharing = "|".join(map(str, range(layers - (metadata.get("attention.shared_kv_layers") or 0), layers)))
    shared = rf"blk\.({sharing})\.attn_(k|v|k_norm)\.weight"  # of layers that attend to an earlier one's
    unread = [drafts] * bool(metadata.get("nextn_predict_layers")) + [shared] * bool(sharing)
    harmless = re.compile("|".join([*HARMLESS, *unread]))
    odd = [name for name in file.tensors if name not in used and not harmless.fullmatch(name)]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise BuildError(
            f"model: {metadata.name}: expected tensors that a {metadata.architecture} has here, got "
            f"{', '.join(odd[:3])}{more}"
        )

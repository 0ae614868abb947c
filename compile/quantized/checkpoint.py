"""Reads a directory whose weights are quantised: layer after layer, in normal form."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import BuildError
from ...kernels.linear.groups import Groups
from ..json_object import read_object
from ..kept_groups import KeptWeight
from .files import places, read
from .mxfp4 import METHOD as MXFP4
from .mxfp4 import kept_blocks, widened_blocks
from .normal import Rounded, Weight
from .readers import READERS, Reader, Settings

FORMATS = (  # of compressed-tensors
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
WIDENED_BY_TRANSFORMERS = ("fp8", MXFP4)  # quant_method of what it reads right


class Quantized(NamedTuple):
    """A quantised checkpoint. method: of READERS. config: what it says of its quantisation."""

    folder: Path
    method: str
    config: Settings

    @property
    def reader(self) -> Reader:
        """Of its method."""
        return READERS[self.method]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(name of a parameter, its weight) of each quantised layer. Raises BuildError."""
        files = places(self.folder)
        for layer, parts in sorted(self._layers(files).items()):
            found = {part: read(files[name], name) for part, name in parts.items()}
            try:
                yield f"{layer}.weight", self.reader.read(found, self._settings(layer))
            except (ValueError, KeyError, RuntimeError) as error:
                said = f"{error.args[0]}, got none" if isinstance(error, KeyError) else str(error).splitlines()[0]
                raise BuildError(f"model: {self.folder}: {layer}: {self.method}: expected {said}") from None

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of all that is no part of a quantised weight."""
        files = places(self.folder)
        used = {name for parts in self._layers(files).values() for name in parts.values()}
        for name, file in files.items():
            if name not in used and not name.endswith((".k_scale", ".v_scale")):  # of a cache of eight bits
                yield name, read(file, name)

    def _layers(self, files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
        """Layer -> part -> name of its tensor, of the layers that have the key of a quantised weight."""
        layers = [name.removesuffix(f".{self.reader.key}") for name in files if name.endswith(f".{self.reader.key}")]
        found = {layer: {part: f"{layer}.{part}" for part in self.reader.parts} for layer in layers}
        return {layer: {part: name for part, name in parts.items() if name in files} for layer, parts in found.items()}

    def _settings(self, layer: str) -> Settings:
        """What the config says of a layer. Raises ValueError."""
        if self.method == "mlx":
            own = self.config.get(layer)
            return {**self.config, **own} if isinstance(own, dict) else self.config
        if self.method != "compressed-tensors":
            return self.config
        groups = self.config["config_groups"].values()
        for fits in (_is_named, _is_matched, _is_class):  # as compressed-tensors looks for it
            for group in groups:
                if any(fits(target, layer) for target in group["targets"]):
                    return dict(group["weights"])
        raise ValueError(f"a group of its config for the layer, got {list(self.config['config_groups'])}")


def quantized(name: str, folder: Path) -> Quantized | None:
    """The quantised checkpoint in a directory, None where its weights are as transformers reads them. Raises BuildError
    for a kind that is not read."""
    config = read_object(folder / "config.json")
    if isinstance(mlx := config.get("quantization"), dict):  # and the same again as quantization_config
        return Quantized(folder, "mlx", mlx)
    own = config.get("quantization_config") or read_object(folder / "hf_quant_config.json").get("quantization")
    if own is None:
        return None
    _check_objects(name, own)
    method = str(own.get("quant_method", "modelopt" if "quant_algo" in own else "one without quant_method"))
    if method in WIDENED_BY_TRANSFORMERS:
        return None
    if method == "bitsandbytes":
        method = f"bitsandbytes {8 if own.get('load_in_8bit') else 4}-bit"
    algorithm = own.get("quant_algo", "FP8")
    sparse = (own.get("sparsity_config") or {}).get("format", "dense")
    formats = [each.get("format") for each in (own, *(own.get("config_groups") or {}).values())]
    odd = [each for each in formats if method == "compressed-tensors" and each not in (None, *FORMATS)]
    odd += [algorithm] * (algorithm not in ("FP8", "NVFP4")) + [sparse] * (sparse != "dense")
    if method not in READERS or odd:
        got = method if method not in READERS else f"{method} {odd[0]}"
        known = ", ".join(sorted({*READERS, *WIDENED_BY_TRANSFORMERS}))
        raise BuildError(
            f"model: {name}: quantization_config: expected one of {known}, or none, got {got}; give the model that it "
            "was made from"
        )
    return Quantized(folder, method, own)


def _check_objects(name: str, own: Any) -> None:
    """Raises BuildError where a config of another shape would end in a traceback."""
    inner = [own.get(key) or {} for key in ("config_groups", "sparsity_config")] if isinstance(own, dict) else []
    groups = list(inner[0].values()) if inner and isinstance(inner[0], dict) else []
    odd = [each for each in (own, *inner, *groups) if not isinstance(each, dict)]
    if odd:
        raise BuildError(f"model: {name}: quantization_config: expected an object, got {odd[0]!r:.40}")


def holds_blocks(folder: Path) -> bool:
    """Whether transformers widens what our kernels may multiply with as it is."""
    own = read_object(folder / "config.json").get("quantization_config")
    return isinstance(own, dict) and own.get("quant_method") == MXFP4


def kept_weights(folder: Path) -> list[KeptWeight]:
    """The quantised weights of a directory that our kernels multiply with as they are."""
    if holds_blocks(folder):
        return kept_blocks(folder)
    found = quantized(str(folder), folder)
    assert found is not None
    return [_kept(weight) for _, weight in found.weights() if not isinstance(weight, Tensor)]


def widened_weights(folder: Path) -> dict[str, list[str]]:
    """The other quantised weights of such a directory: their names by method."""
    if holds_blocks(folder):
        method, names = MXFP4, widened_blocks(folder)
    else:
        found = quantized(str(folder), folder)
        assert found is not None
        method, names = found.method, [name for name, weight in found.weights() if isinstance(weight, Tensor)]
    return {method: names} if names else {}


def _kept(weight: Groups | Rounded) -> KeptWeight:
    groups = weight.groups if isinstance(weight, Rounded) else weight
    rows, steps, size = groups.quants.shape
    return KeptWeight(groups.kind, rows, steps * size, lambda index: groups.each(lambda part: part[index]))


def values(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The numbers that a weight stands for; in bfloat16, in which groups are kept, those of the groups."""
    if isinstance(weight, Rounded):
        weight = weight.groups if dtype == torch.bfloat16 else weight.values
    if isinstance(weight, Groups):
        return weight.values(weight.quants.shape[-2] * weight.quants.shape[-1]).to(dtype)
    return weight.to(dtype)


def _is_named(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _is_matched(target: str, layer: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], layer) is not None


def _is_class(target: str, layer: str) -> bool:
    return target == "Linear"

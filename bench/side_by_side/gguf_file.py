"""The model as llama.cpp and OpenVINO read it: a GGUF file in another precision, with the metadata of its source."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from specstep.compile.locate import gguf_file
from specstep.progress import OnProgress

from .engines import AS_IT_IS, Settings, Skip

TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
GROUP = 32  # weights of a block in both low precisions
FINE = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q6_K)  # what a 4-bit file keeps for its head


def convert(source: Path, precision: str, target: Path, progress: OnProgress) -> None:
    """Write a GGUF file with its matrices in a precision of TYPES, vectors in float32.

    A matrix that the source holds in Q8_0 or Q6_K stays in Q8_0 in a file of q4_0: that is the head, which llama.cpp's
    own quantiser keeps finer, too.
    """
    reader = GGUFReader(source)
    kind, file_type = TYPES[precision]
    architecture = reader.fields["general.architecture"].contents()
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, architecture)
    _copy_metadata(reader, writer, file_type)
    for index, tensor in enumerate(reader.tensors):
        if index % 50 == 0:
            progress(f"{target.name}: tensor {index + 1} of {len(reader.tensors)}")
        its_kind = _kind(tensor, kind)
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        writer.add_tensor(tensor.name, quantize(values, its_kind), raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)  # a file that stands there is whole


def _kind(tensor: Any, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) < 2 or tensor.shape[0] < GROUP:  # taps of a convolution
        return GGMLQuantizationType.F32
    if wanted is not GGMLQuantizationType.BF16 and tensor.shape[0] % GROUP:
        return GGMLQuantizationType.BF16
    finer = wanted is GGMLQuantizationType.Q4_0 and tensor.tensor_type in FINE
    return GGMLQuantizationType.Q8_0 if finer else wanted


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, file_type: LlamaFileType) -> None:
    """Everything but what the writer says itself and the precision: tokenizer and chat template among it."""
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    writer.add_file_type(file_type)


def converted(precision: str, settings: Settings, progress: OnProgress) -> Path:
    """The settings' model in a precision, written unless it is there; the file itself where nothing is converted.
    Raises Skip for a model that is no GGUF file."""
    source = gguf_file(settings.model)
    if source is None:
        raise Skip(f"it reads GGUF files, {settings.model} is none: give MODEL=FILE.gguf")
    if precision == AS_IT_IS:
        return source
    stamp = hashlib.sha256(f"{source.stat().st_size} {source.stat().st_mtime_ns}".encode()).hexdigest()[:8]
    target = settings.folder / f"{source.stem}-{stamp}.{precision}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, precision, target, progress)
    return target

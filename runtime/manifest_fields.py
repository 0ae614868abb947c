"""The fields of manifest.json, with their types and ranges."""

import re
from typing import Any

from ..backends import BACKENDS, FLOATS
from ..controls import MOST_LEARNED_ROWS, MOST_LOOKAHEAD, STOP_IDS
from .json_checks import (
    anything,
    equal_to,
    fields,
    integer,
    line,
    list_of,
    mapping_of,
    number,
    one_of,
    optional,
    refusal,
    text,
    truth,
)

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8,
}  # fmt: skip
SLOT_STEP = 64  # programs take any multiple of it
INTEGER = integer(-(2**63), 2**63 - 1)


def file_name(name: str, value: Any) -> None:
    """Takes the name of a file that lies in the directory itself."""
    if not isinstance(value, str) or not re.fullmatch(r"[\w+-][\w.+-]{0,254}", value) or value == "manifest.json":
        raise refusal(name, "a name of letters, digits and . _ + -", value)


def _operator(name: str, value: Any) -> None:
    if not re.fullmatch(r"[\w:.]+", value):
        raise refusal(name, "a name of letters, digits and _ : .", value)


def _sha256(name: str, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise refusal(name, "64 hexadecimal digits", value)


def _requirement(name: str, value: Any) -> None:
    if isinstance(value, list):
        list_of(line)(name, value)
    else:
        optional(line)(name, value)


def _sizes(name: str, value: Any) -> None:
    list_of(integer(0))(name, value)
    if len(value) != 3:
        raise refusal(name, "the least, the best and the most", value)


def _path(name: str, value: Any) -> None:
    list_of(integer(0, 256), 64)(name, value)
    if not value:
        raise refusal(name, "a path of at least one node", value)


DIMENSION, NODES, DEPTH = integer(0), integer(0, 256), integer(0, 64)
TENSOR = fields(
    {
        "name": text,
        "shape": list_of(DIMENSION, 8),
        "dtype": one_of(*DTYPE_BYTES),
        "fill": INTEGER,
    }
)
PROGRAM = fields({"file": file_name, "inputs": list_of(text), "outputs": list_of(text), "constants": mapping_of(text)})
CONFIG = fields(
    {
        "drafter": text,
        "nodes": NODES,
        "depth": DEPTH,
        "top_k": integer(0, 64),
        "learned_rows": integer(0, MOST_LEARNED_ROWS),
        "dtype": one_of(*FLOATS),
        "device": one_of("cpu", "cuda"),
        "backend": one_of(*BACKENDS),
        "max_batch": integer(1, 256),
        "max_seq_len": integer(4),
        "prefill_chunk": integer(2, 8192),
        "forced_acceptance": optional(number),
    },
    maybe={"ranks": integer(1, 64), "draft_ranks": integer(1, 64), "kv_cache": one_of("auto", "int8")},
    further=True,
)
SPEC = fields(
    {
        "config": CONFIG,
        "max_batch": integer(1, 256),
        "max_seq_len": integer(4),
        "capacity": integer(1),
        "slot_step": equal_to(SLOT_STEP),
        "scratch": integer(1),
        "catch_up": integer(0),
        "drafter_tensors": list_of(text),
        "recurrent": list_of(text),
        "prefill_chunk": integer(2),
        "vocab_size": integer(1, 2**31),
        "stop_ids": list_of(INTEGER, STOP_IDS),
        "device": text,
        "state": list_of(TENSOR),
        "shared": list_of(TENSOR),
        "caches": list_of(TENSOR),
        "prefill": PROGRAM,
        "step": PROGRAM,
        "plain": optional(PROGRAM),
        "lookahead": integer(1, MOST_LOOKAHEAD),
    }
)
TREE = fields(
    {
        "kind": text,
        "nodes": NODES,
        "depth": DEPTH,
        "top_k": integer(0, 64),
        "frontiers": list_of(integer(0, 2**16), 65),
        "paths": optional(list_of(_path, 256)),
    }
)
DESCRIBED = mapping_of(fields({"dtype": text, "shape": list_of(anything)}, further=True))  # tensors, for `inspect`
PLAN = fields(
    {
        "layers": integer(0),
        "plugins": mapping_of(integer(0)),
        "profiles": list_of(mapping_of(_sizes)),
        "tensors": DESCRIBED,
    }
)
TOOLS = fields({"name": text, "lists": truth, "keeps": truth, "channels": truth, "written": text})
ABOUT = fields(
    {
        "model": fields({"name": text, "parameters": integer(0)}, maybe={"adapter": text}, further=True),
        "tree": TREE,
        "stages": mapping_of(fields({"nodes": integer(0), "parameters": integer(0)})),
        "versions": mapping_of(text),
        "build_s": number,
        "special_tokens": mapping_of(text),
        "sampling": optional(mapping_of(anything)),
        "tools": optional(TOOLS),
    },
    maybe={
        "weights": mapping_of(integer(0)),
        "operators": mapping_of(integer(0), names=_operator),
        "drafts_may_change_text": list_of(line),
        "vocabularies": list_of(line),
        "widened": mapping_of(list_of(line), names=line),
        "stage_s": mapping_of(number, names=line),
        "models": mapping_of(fields({"opset": integer(0), "tensors": DESCRIBED}, further=True)),
        "plans": mapping_of(PLAN),
    },
    further=True,
)

TENSORRT = fields({"compute_capability": list_of(line), "plugins": truth, "plans": anything}, further=True)


MANIFEST_FIELDS = fields(
    {
        "format_version": anything,
        "spec": SPEC,
        "requires": mapping_of(_requirement, names=line),
        "about": ABOUT,
        "files": mapping_of(fields({"bytes": integer(0), "sha256": _sha256}), names=file_name),
    }
)

"""The engine directory: what its manifest says, and how it is checked before anything of it is run.

manifest.json            format version, configuration, programs with their inputs and outputs, state layout, sha256 of
                         each file
prefill.pt2, step.pt2,   the compiled graphs, without weights; the last one where steps may draft nothing. NAME.onnx for
plain.pt2                the backend onnx, NAME.plan for those of TensorRT, weights included and without the last
libspecstep.so           our C++ kernels, for engines of AOTInductor on a CPU
weights.safetensors      all weights once, memory-mapped and shared by all of them; weights.rank0.safetensors and so on
                         where several ranks have a share of them each
tokenizer.json, chat_template.jinja
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import EngineError
from .manifest_fields import DTYPE_BYTES
from .manifest_rules import NEXT as NEXT  # in a program that writes nothing in place
from .manifest_rules import WEIGHTS as WEIGHTS
from .manifest_rules import check_manifest, weights_files

FORMAT_VERSION = 18
MANIFEST = "manifest.json"
SIZES = ("nodes", "catch_up")  # inputs of a step that hold 0, 1, ..., and say by their length how many
TREE = ("tree_tokens", "tree_parents")  # the state in which a drafted tree lies
MOST_MANIFEST = 2**26  # bytes; that of a model of 100 layers has 200 KB
LAYOUT = "specstep.weights_layout"  # in the metadata of an ONNX model: what `layout_of` gives
REBUILD = "build the engine again with `specstep build`"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that the session allocates: full shape, dtype name as in torch, and the value it starts with."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: int = 0

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class ProgramSpec:
    """A compiled graph: its file, the names of its flat inputs and outputs in order, and for each of its constants
    the name of the tensor in the weights file."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class EngineSpec:
    """All that the runtime knows of an engine. `state`, `shared` and `caches` are allocated once and bound to every
    call."""

    config: dict[str, Any]  # the build options, and the tree's nodes, depth and top_k
    max_batch: int  # rows
    max_seq_len: int  # most tokens of a row, prompt included
    capacity: int  # slots of each cache
    slot_step: int  # a step may be given any multiple of it below `capacity`
    scratch: int  # slots past a row's length that a step writes
    catch_up: int  # most positions that a drafter which pauses processes in a step; 0: it does not pause
    drafter_tensors: tuple[str, ...]  # names of the state and caches that are the drafter's own
    recurrent: tuple[str, ...]  # names of the state that recurrent layers keep: it cannot be cut back to fewer tokens
    prefill_chunk: int  # most prompt tokens per prefill call
    vocab_size: int  # of the target's logits
    stop_ids: tuple[int, ...]  # tokens that end an answer
    device: str  # "cpu" or "cuda"
    state: tuple[TensorSpec, ...]  # with a part for each row
    shared: tuple[TensorSpec, ...]  # of all rows together
    caches: tuple[TensorSpec, ...]  # keys of every layer, then values, the target's layers first
    prefill: ProgramSpec  # a chunk of a prompt into a row's caches
    step: ProgramSpec  # the speculative step
    plain: ProgramSpec | None = None  # verifies the roots alone and drafts nothing; None: there is no such step
    lookahead: int = 1  # slot p of a cache may depend on tokens up to p + lookahead, see `Scorer`

    @property
    def programs(self) -> dict[str, ProgramSpec]:
        """All programs by name."""
        plain = {} if self.plain is None else {"plain": self.plain}
        return {"prefill": self.prefill, "step": self.step} | plain

    @property
    def ranks(self) -> int:
        """Processes that share the target's weights and work."""
        return int(self.config.get("ranks", 1))

    @property
    def weights_files(self) -> list[str]:
        """The file of each rank's weights."""
        return weights_files(self.ranks)

    @property
    def nodes(self) -> int:
        """Nodes of a drafted tree, the root not counted: the most that a step may be given."""
        return int(self.config["nodes"])

    @property
    def depth(self) -> int:
        """Levels of a drafted tree: the most nodes that a step accepts."""
        return int(self.config["depth"])

    @property
    def most_slots(self) -> int:
        """The most slots that a program may be given."""
        return self.capacity - self.slot_step


@dataclass(frozen=True)
class Manifest:
    """The whole of manifest.json. `requires` is what the machine must have; `about` is for people."""

    spec: EngineSpec
    requires: dict[str, Any]
    about: dict[str, Any]
    files: dict[str, dict[str, Any]]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def read_manifest(directory: str | Path) -> Manifest:
    """Read and check manifest.json. Raises EngineError when there is none, or when it is not of this format version."""
    path = Path(directory) / MANIFEST
    if not path.is_file():
        raise EngineError(f"engine: expected a directory with {MANIFEST}, got {directory}; {REBUILD}")
    try:
        if path.stat().st_size > MOST_MANIFEST:
            raise ValueError(f"more than {MOST_MANIFEST} bytes")
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        version = data["format_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineError(
            f"{path}: expected an engine manifest, got a file that does not parse ({error!r:.200}); {REBUILD}"
        ) from None
    if type(version) is not int or version != FORMAT_VERSION:
        raise EngineError(f"{path}: format_version: expected {FORMAT_VERSION}, got {version!r:.60}; {REBUILD}")
    try:
        check_manifest(data)
    except ValueError as error:
        raise EngineError(f"{path}: {error}; copy it again or {REBUILD}") from None
    return Manifest(**(data | {"spec": _spec(data["spec"])}))


def manifest_digest(directory: Path) -> str:
    """What tells the manifest there from others."""
    with (directory / MANIFEST).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name}, which is no number of JSON")


def _spec(data: dict[str, Any]) -> EngineSpec:
    tensors = {
        name: tuple(TensorSpec(**(entry | {"shape": tuple(entry["shape"])})) for entry in data[name])
        for name in ("state", "shared", "caches")
    }
    programs = {
        name: ProgramSpec(**(data[name] | {key: tuple(data[name][key]) for key in ("inputs", "outputs")}))
        for name in ("prefill", "step", "plain")
        if data.get(name)
    }
    lists = {name: tuple(data[name]) for name in ("stop_ids", "drafter_tensors", "recurrent")}
    return EngineSpec(**(data | lists | tensors | programs))


def file_entry(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as the manifest records them."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def check_files(directory: Path, manifest: Manifest, deep: bool) -> None:
    """Compare each file with the manifest: presence and size always, content too where `deep` or where it is small
    enough to cost nothing (the weights of a large model would take longer to hash than to run)."""
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise EngineError(
                f"{path}: expected a file of {expected['bytes']} bytes, got none; copy it again or {REBUILD}"
            )
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise EngineError(f"{path}: expected {expected['bytes']} bytes, got {size}; copy it again or {REBUILD}")
        if deep or name not in manifest.spec.weights_files:
            got = file_entry(path)["sha256"]
            if got != expected["sha256"]:
                raise EngineError(
                    f"{path}: expected sha256 {expected['sha256'][:12]}…, got {got[:12]}…: the file was altered; "
                    f"copy it again or {REBUILD}"
                )


def layout_of(weights: Path) -> str:
    """A digest of where each tensor of a weights file lies, and of its kind. Raises OSError for what has no header."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= weights.stat().st_size - 8:
            raise OSError(f"expected a header of 1 to {weights.stat().st_size - 8} bytes, got {size}")
        return hashlib.sha256(file.read(size)).hexdigest()


def check_machine(manifest: Manifest, machine: dict[str, Any]) -> None:
    """Compare what the engine requires with what `machine` offers, e.g. {"torch": "2.13.0", "instructions":
    ["avx512f", …]}."""
    for field, expected in manifest.requires.items():
        got = machine.get(field)
        if isinstance(expected, list):
            missing = sorted(set(expected) - set(got or ()))
            if missing:
                raise EngineError(
                    f"engine: {field}: expected {' '.join(expected)}, "
                    f"this machine lacks {' '.join(missing)}; {REBUILD} here"
                )
        elif got != expected:
            raise EngineError(
                f"engine: {field}: expected {expected}, got {got}; {REBUILD} here, or install the expected one"
            )

"""What a user may choose when building an engine."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypedDict, get_args, get_type_hints

import torch

from ..backends import BACKENDS, Backend
from ..controls import LEARNED_ROWS, MOST_LEARNED_ROWS
from ..errors import BuildError
from ..graphs.drafters.drafter import Scorer
from ..runtime.calls.formats import FORMATS
from .gpus import GPU, GPUS

TREES = ("chain", "static", "dynamic")
WEIGHTS = {"auto": "", "bfloat16": "cpu", "int8": "cpu", "int4": "cpu", "fp8": "cuda"}  # and what takes them alone
KV_CACHES = ("auto", "int8")
FP8_CAPABILITY = 8.9  # the first
MOST_PARTS = 64


class BuildOptions(TypedDict, total=False):
    """What `build`, `jit` and `eager` take beside the model: the fields of `EngineConfig`, where `drafter` may also be
    a `Scorer`."""

    drafter: str | Scorer
    adapter: str | None
    nodes: int | None
    tree: str | None
    depth: int | None
    top_k: int | None
    tree_choices: str | None
    learned_rows: int
    dtype: str
    weights: str
    kv_cache: str
    device: str
    backend: str
    max_batch: int
    max_seq_len: int
    prefill_chunk: int
    compute_capability: tuple[str, ...] | None
    sum_parts: int
    ranks: int
    draft_ranks: int
    plugins: bool
    tool_format: str | None
    forced_acceptance: int | None


@dataclass(frozen=True)
class EngineConfig:
    """Build options, validated. Raises BuildError, which names the field, what was expected and what was given."""

    # "none"; "ngram", over the row's own history; "default", what the package has for the model, else ngram; "auto",
    # what `specstep tune` chose on this machine, else default, else an EAGLE-3 head that lies beside the model, with
    # ngram; "mtp", a module in the model's own checkpoint; count tables, a smaller causal LM or a published head, by a
    # path or a hub id; "package.module:factory", called with the loaded target, which returns a `Scorer`; or several of
    # these with commas, mixed at every node.
    drafter: str = "default"
    adapter: str | None = None  # a LoRA of PEFT, by a directory or a hub id, merged into the model's weights
    nodes: int | None = None  # drafted tokens of a tree, the root not counted; None: the drafter's default
    tree: str | None = None  # "chain"; "dynamic", `depth` levels of `top_k`; "static", the paths of `tree_choices`
    depth: int | None = None  # levels of a tree; None: the drafter's default
    top_k: int | None = None  # most children of a node; None: the drafter's default
    tree_choices: str | None = None  # a JSON file with the paths of a static tree; None: likely ones
    # rows of the table in which an n-gram drafter counts what the engine writes, 16 entries of 8 bytes each; 0: it
    # learns nothing. A vocabulary of more than a million tokens is not learned.
    learned_rows: int = LEARNED_ROWS
    dtype: str = "bfloat16"  # of what is computed and of the caches; float32 is the default of the backend onnx
    # what linear layers have with bfloat16. On a CPU: "auto" keeps the blocks of q8_0, q4_0 and q4_1 that a GGUF file
    # has, and bfloat16 where there are none; "int8" and "int4" quantise in groups of 32; "bfloat16" widens
    # everything. On a GPU: "fp8" rounds all but the head, and what they are multiplied with, to eight bits.
    weights: str = "auto"
    kv_cache: str = "auto"  # "auto", of `dtype`; "int8", on a CPU: see `kernels/int8_rows.py`
    device: str = "cpu"  # "cpu" or "cuda"
    backend: str = "inductor"  # a key of `backends.BACKENDS`
    max_batch: int = 1  # rows: requests that share a step
    max_seq_len: int = 2048  # most tokens of a row, prompt included
    prefill_chunk: int = 512  # most prompt tokens of one prefill call
    # GPUs to build for, which need not be there: several for tensorrt-rtx, as ("8.9", "12.0"), one for inductor with
    # device cuda; None: the GPU at hand.
    compute_capability: tuple[str, ...] | None = None
    # rowwise layers are sums of so many products, over slices of their inputs: the bits of as many ranks on one device.
    sum_parts: int = 1
    ranks: int = 1  # processes of one machine that share the target's weights and work, on a GPU each with device cuda
    draft_ranks: int = 1  # how many of these share a draft model: 1, each runs it whole, or all; of parts likewise
    plugins: bool = True  # whether TensorRT runs our kernels as plugins, or builds our ops from its own layers
    # how the model writes calls of tools, a name of `runtime.calls.formats`; None: as its chat template has it.
    tool_format: str | None = None
    # for measurements: so many drafts are accepted in each step, whatever the target says; the text is then wrong.
    forced_acceptance: int | None = None

    @property
    def gpu(self) -> GPU | None:
        """The GPU that AOTInductor builds for without it, None where the engine is for the device at hand."""
        return GPUS[self.compute_capability[0]] if self.device == "cuda" and self.compute_capability else None

    @property
    def build_device(self) -> str:
        """Where the models lie while the engine is built."""
        return self.device if self.gpu is None else "cpu"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_choice("backend", BACKENDS)
        self._check_choice("tree", (*TREES, None))
        self._check_choice("weights", WEIGHTS)
        self._check_choice("kv_cache", KV_CACHES)
        self._check_choice("tool_format", (*FORMATS, None))
        backend = BACKENDS[self.backend]
        self._check_choice("dtype", backend.dtypes, f" for backend {self.backend}")
        self._check_choice("device", backend.devices, f" for backend {self.backend}")
        self._check_backend_options(backend)
        ranges = {
            "nodes": (0, 256), "depth": (0, 64), "top_k": (1, 64), "max_batch": (1, 256), "prefill_chunk": (2, 8192),
            "forced_acceptance": (0, 64), "learned_rows": (0, MOST_LEARNED_ROWS),
            "sum_parts": (1, MOST_PARTS), "ranks": (1, MOST_PARTS), "draft_ranks": (1, MOST_PARTS),
        }  # fmt: skip
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise BuildError(f"{field}: expected {low} to {high}, got {value}")
        if not self.max_seq_len >= 4:
            raise BuildError(f"max_seq_len: expected at least 4, got {self.max_seq_len}")

    def _check_types(self) -> None:
        hints = get_type_hints(EngineConfig)
        for field in dataclasses.fields(self):
            got, kinds = getattr(self, field.name), get_args(hints[field.name]) or (hints[field.name],)
            if not any(_is_a(got, kind) for kind in kinds):
                names = [TYPE_NAMES[kind] for kind in kinds] + ["a Scorer"] * (field.name == "drafter")
                raise BuildError(f"{field.name}: expected {' or '.join(names)}, got {got!r}")

    def _check_choice(self, field: str, known: Collection[str | None], context: str = "") -> None:
        got = getattr(self, field)
        if got not in known:
            names = [name for name in known if name]
            expected = " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"
            raise BuildError(f"{field}: expected {expected}{context}, got {got}")

    def _check_backend_options(self, backend: Backend) -> None:
        """The options that not every backend has. Raises BuildError."""
        device = WEIGHTS[self.weights]
        if device and (self.device, self.dtype) != (device, "bfloat16"):
            raise BuildError(
                f"weights: expected auto with dtype {self.dtype} on {self.device}, got {self.weights}; dtype bfloat16 "
                f"on {device} takes it"
            )
        defaults = {
            "plugins": True, "compute_capability": None, "weights": "auto", "kv_cache": "auto", "sum_parts": 1,
            "ranks": 1, "draft_ranks": 1,
        }  # fmt: skip
        for field, default in defaults.items():
            got = getattr(self, field)
            if got != default and field not in backend.options:
                takers = " or ".join(name for name, other in BACKENDS.items() if field in other.options)
                raise BuildError(
                    f"{field}: expected {default} for backend {self.backend}, got {got}; {takers} takes it"
                )
        for field in ("kv_cache", "sum_parts"):
            if getattr(self, field) != defaults[field] and self.device != "cpu":
                raise BuildError(
                    f"{field}: expected {defaults[field]} with device {self.device}, got {getattr(self, field)}; "
                    "device cpu takes it"
                )
        self._check_ranks()
        if self.compute_capability is not None:
            self._check_compute_capability(self.compute_capability)

    def _check_ranks(self) -> None:
        """Numbers of ranks that do not go together. Raises BuildError."""
        if self.ranks > 1 and self.sum_parts > 1:
            raise BuildError(
                f"sum_parts: expected 1 with {self.ranks} ranks, which have those parts, got {self.sum_parts}"
            )
        most = max(self.ranks, self.sum_parts)
        if self.draft_ranks not in (1, most):
            expected = f"1, or {most} as the target has" if most > 1 else "1 without --ranks"
            raise BuildError(f"draft_ranks: expected {expected}, got {self.draft_ranks}")

    def _check_compute_capability(self, named: tuple[str, ...]) -> None:
        if self.backend != "inductor":
            odd = [name for name in named if not re.fullmatch(r"\d{1,2}\.\d", name)]
            if odd or not named:
                raise BuildError(f"compute_capability: expected numbers as 8.9, got {' '.join(odd) or 'none'}")
        elif self.device != "cuda":
            raise BuildError(
                f"compute_capability: expected None with device {self.device}, got {' '.join(named)}; device cuda "
                "takes it"
            )
        elif len(named) != 1 or named[0] not in GPUS:
            raise BuildError(
                f"compute_capability: expected one of {', '.join(GPUS)} for backend inductor, got "
                f"{' '.join(named) or 'none'}; leave it out to build for the GPU at hand"
            )


TYPE_NAMES: dict[Any, str] = {
    str: "a string", int: "an integer", bool: "True or False", tuple[str, ...]: "a tuple of strings", NoneType: "None"
}  # fmt: skip


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value is of a type of TYPE_NAMES. True is no integer."""
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    return type(value) is kind


def given_scorer(options: Mapping[str, Any]) -> Scorer | None:
    """The drafter of `BuildOptions` where it is no name."""
    drafter = options.get("drafter")
    return drafter if isinstance(drafter, Scorer) else None


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """`BuildOptions` -> a validated config, in which the name of its class stands for a `Scorer`. Raises BuildError
    for an unknown name, a value of another type or one out of range."""
    unknown = sorted(set(options) - set(BuildOptions.__annotations__))
    if unknown:
        raise BuildError(
            f"options: expected some of {', '.join(sorted(BuildOptions.__annotations__))}, got {', '.join(unknown)}"
        )
    given = dict(options)
    if scorer := given_scorer(options):
        given["drafter"] = f"{type(scorer).__module__}.{type(scorer).__qualname__}"
    if isinstance(capabilities := given.get("compute_capability"), list):  # as the command line and a manifest give it
        given["compute_capability"] = tuple(capabilities)
    if (backend := given.get("backend")) in (*BACKENDS,):
        given = {"dtype": BACKENDS[backend].dtypes[0]} | given
    config = EngineConfig(**given)
    if config.device == "cuda" and config.gpu is None and not torch.cuda.is_available():
        raise BuildError(
            "device: expected cpu, got cuda on a machine without a usable NVIDIA GPU; to build for one that is "
            "elsewhere, name its compute capability, as --compute-capability 9.0"
        )
    if config.weights == "fp8":
        named = config.gpu and config.gpu.capability
        capability = named or "{}.{}".format(*torch.cuda.get_device_capability())
        if float(capability) < FP8_CAPABILITY:
            raise BuildError(
                f"weights: expected auto for compute capability {capability}, got fp8, which {FP8_CAPABILITY} and "
                "later have"
            )
    return config

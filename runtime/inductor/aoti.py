"""Run programs that AOTInductor compiled: torch's C++ loader, the shared weights, and what this machine offers.

The loader is called directly: its Python wrapper would import Inductor's compiler, which a runtime has no use for.
"""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import EngineError, InputError, one_line
from ...kernels.native import LIBRARY_NAME, load_library
from ...processor import cpu_instructions
from ...progress import OnProgress
from ..engine_file import REBUILD, EngineSpec, Manifest, ProgramSpec
from ..gpu import plan_memory, refuse_gpu
from ..ranks.open import open_ranks
from ..ranks.places import gpus_of_ranks
from ..session import Session
from .signature import Signature, check_tensors, check_weights
from .torch_session import Program, TorchSession

Weights = dict[str, Tensor]


class LoadedProgram:
    """A compiled graph, called as a `Program`, and the weights that it was lent, by its names; it keeps them alive."""

    def __init__(self, loader: Any, weights: Weights):
        self.weights, self._loader = weights, loader

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._loader.run(list(inputs))


def machine() -> dict[str, Any]:
    """What an engine's `requires` is compared with: torch version, processor architecture, instructions, GPU."""
    gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__.split("+")[0],
        "architecture": platform.machine(),
        "instructions": cpu_instructions(),
        "cuda_capability": "{}.{}".format(*torch.cuda.get_device_capability()) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
    }


def open_session(directory: Path, manifest: Manifest, gpu: int | None, progress: OnProgress) -> Session:
    """Load the programs, lend them the mapped weights. Raises EngineError for what does not load here, and InputError
    for a GPU that is not there."""
    if manifest.spec.device == "cpu":
        refuse_gpu(gpu)
        return _open_session(directory, manifest)
    if gpu is not None and gpu >= torch.cuda.device_count():
        raise InputError(f"device: expected one of the {torch.cuda.device_count()} GPUs here, got cuda:{gpu}")
    with torch.cuda.device(torch.cuda.current_device() if gpu is None else gpu):
        gpus_of_ranks(torch.cuda.current_device(), manifest.spec.ranks)
        progress(check_memory(manifest))
        return _open_session(directory, manifest)


def check_memory(manifest: Manifest, rank: int = 0) -> str:
    """A line about what a rank of an engine will take of the current GPU's memory. Raises EngineError where that is
    more than is free."""
    gpu = f"cuda:{torch.cuda.current_device()}"
    return plan_memory(manifest, torch.cuda.mem_get_info()[0], gpu, rank)


def _open_session(directory: Path, manifest: Manifest) -> Session:
    """Load the programs for the CPU or the current GPU."""
    spec = manifest.spec
    load_libraries(directory, manifest)
    programs = open_programs(directory, spec)
    if spec.ranks == 1:
        return TorchSession(spec, *programs)
    return open_ranks(directory, spec, programs)


def open_programs(directory: Path, spec: EngineSpec, rank: int = 0) -> list[Program]:
    """Load the programs and lend them a rank's weights. Raises EngineError."""
    path = directory / spec.weights_files[rank]
    weights = open_weights(path, spec)
    return [load_program(directory, spec, program, path, weights) for program in spec.programs.values()]


def load_libraries(directory: Path, manifest: Manifest) -> None:
    """Load the ops that the programs call, where the engine brings any."""
    if LIBRARY_NAME in manifest.files:
        try:
            load_library(directory / LIBRARY_NAME)
        except OSError as error:
            raise EngineError(
                f"{directory / LIBRARY_NAME}: expected a library that loads here, got {one_line(error)}; {REBUILD}"
            ) from None


def open_weights(path: Path, spec: EngineSpec) -> Weights:
    """Map a weights file: {name: tensor}. On a CPU the tensors are views of the mapped file, else on the current
    GPU."""
    device = f"cuda:{torch.cuda.current_device()}" if spec.device == "cuda" else "cpu"
    try:
        with safe_open(str(path), framework="pt", device=device) as file:
            written = (file.metadata() or {}).get("file", path.name)  # as which a rank's file was written
            if written != path.name:
                raise OSError(f"that which was written as {written}")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        reason = one_line(error)
        raise EngineError(f"{path}: expected a safetensors file, got {reason}; copy it again or {REBUILD}") from None


def load_program(
    directory: Path, spec: EngineSpec, program: ProgramSpec, weights_path: Path, weights: Weights
) -> LoadedProgram:
    """Load one compiled graph and lend it the weights of a file; it keeps no copy of them. Raises EngineError where the
    manifest or the weights are not those that it was compiled for."""
    path = directory / program.file
    index = torch.cuda.current_device() if spec.device == "cuda" else -1
    try:
        # Single-threaded: one stream of calls per engine, and CUDA graph capture needs it (pytorch#148601).
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
        expected = set(loader.get_constant_fqns())
        if expected != set(program.constants):
            odd = sorted(expected ^ set(program.constants))[:3]
            raise EngineError(
                f"{path}: constants: expected those of the manifest, got a difference in {odd!s:.300}; {REBUILD}"
            )
        signature = Signature.read(loader.get_metadata())
        check_tensors(path, signature, spec, program)
        check_weights(weights_path, signature, program, weights)
        constants = {name: weights[stored] for name, stored in program.constants.items()}
        loader.load_constants(constants, False, True, True)  # all of them, lent, not copied
    except (RuntimeError, KeyError) as error:
        raise EngineError(f"{path}: expected a program that loads here, got {one_line(error)}; {REBUILD}") from None

    return LoadedProgram(loader, constants)

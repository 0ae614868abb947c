"""Lower an exported graph with AOTInductor."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..kernels.linear import LIBRARY_NAME, build_library, c_shims
from .passes import use_small_linear

CONFIG: dict[str, Any] = {
    # The weights stay out of the package and keep their names: both programs are lent the same mapped file.
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
    # The thread count is the machine's that runs the engine, not the builder's.
    "cpp.dynamic_threads": True,
}


def compile_program(exported: ExportedProgram, path: Path) -> None:
    """Write `path` (.pt2): the compiled graph, without weights. On a CPU its linear layers are ours
    (`kernels.linear`)."""
    config = dict(CONFIG)
    if use_small_linear(exported):
        config["aot_inductor.custom_ops_to_c_shims"] = c_shims()
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=config)


def copy_libraries(directory: Path) -> None:
    """Put the library of our CPU ops beside the programs that call it."""
    shutil.copy(build_library(), directory / LIBRARY_NAME)


def constant_names(path: Path, device: str) -> list[str]:
    """Names of the weights that a compiled graph must be lent."""
    index = torch.cuda.current_device() if device == "cuda" else -1
    return list(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index).get_constant_fqns())

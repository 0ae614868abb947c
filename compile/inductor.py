"""Lower an exported graph with AOTInductor."""

from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

CONFIG: dict[str, Any] = {
    # The weights stay out of the package and keep their names: both programs are lent the same mapped file.
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
}


def compile_program(exported: ExportedProgram, path: Path) -> None:
    """Write `path` (.pt2): the compiled graph, without weights."""
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=dict(CONFIG))


def constant_names(path: Path, device: str) -> list[str]:
    """Names of the weights that a compiled graph must be lent."""
    index = torch.cuda.current_device() if device == "cuda" else -1
    return list(torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index).get_constant_fqns())

"""What Inductor is told, by its settings."""

from typing import Any

from torch._inductor import config

from ...kernels.native import c_shims, has_library
from . import exact

CONFIG: dict[str, Any] = {
    # The weights stay out of the package and keep their names: all programs are lent the same mapped file.
    "always_keep_tensor_constants": True,
    "aot_inductor.package_constants_in_so": False,
}
GPU_CONFIG: dict[str, Any] = {
    "shape_padding": False,  # it would copy weights of odd sizes in each step
}
# One launch for small kernels that do not wait for each other; reductions over a size that varies cannot be in one.
FEW_LAUNCHES: dict[str, Any] = {"combo_kernels": True, "combo_kernels_pointwise_only": True}
# Checks of sizes that only run when an environment variable asks for them, and line numbers for debuggers.
UNCHECKED: dict[str, Any] = {"size_asserts": False, "aot_inductor.enable_line_tables": False}
# With how many others a kernel is compared that read the same buffer. Every layer's kernels read the positions; those
# that are worth fusing are neighbours. With 64, PyTorch's default, the pairs take a third of all time in Python.
FEW_PAIRS: dict[str, Any] = {"max_fusion_buffer_group_pairwise_attempts": 8}


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """Those settings that this version of PyTorch has."""
    names = config.get_config_copy()
    return {name: value for name, value in settings.items() if name in names}


def cpu_settings() -> dict[str, Any]:
    """Inductor's, for programs of a CPU."""
    ours = exact.CONFIG | {"aot_inductor.custom_ops_to_c_shims": c_shims()} if has_library() else {}
    return CONFIG | known(UNCHECKED) | ours | known(FEW_PAIRS)


def gpu_settings() -> dict[str, Any]:
    """Those for programs of a GPU."""
    return CONFIG | known(UNCHECKED) | GPU_CONFIG | (FEW_LAUNCHES if known(FEW_LAUNCHES) == FEW_LAUNCHES else {})

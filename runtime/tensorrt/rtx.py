"""What TensorRT for RTX does at run time, unlike TensorRT: it compiles kernels for the GPU at hand, and it captures
CUDA graphs by itself."""

import contextlib
from pathlib import Path
from typing import Any

from ...user_cache import cache_path, keep
from .plan import Execution, Plan


class RuntimeCache:
    """The kernels that a plan's contexts compile, kept from process to process."""

    def __init__(self, config: Any, path: Path):
        """config: an IRuntimeConfig, of contexts to come. What was kept for another GPU or version is not taken."""
        self._cache, self._path, self._kept = config.create_runtime_cache(), path, b""
        with contextlib.suppress(OSError):
            self._kept = path.read_bytes()
            self._cache.deserialize(self._kept)
        config.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Keep what was compiled since."""
        data = self._cache.serialize()
        if data is not None and bytes(data) != self._kept:
            with contextlib.suppress(OSError):  # kernels that cannot be kept run as well
                keep(self._path, bytes(data))


def execution(plan: Plan, captures: bool) -> Execution:
    """A context of a plan. With TensorRT for RTX its compiled kernels are cached on disk and, where `captures`, it runs
    as a CUDA graph; kernels are then compiled eagerly for the bound shapes, so that every replay runs the same ones."""
    if not hasattr(plan.library, "CudaGraphStrategy"):  # TensorRT
        return Execution(plan)
    config = plan.engine.create_runtime_config()
    if captures:
        config.cuda_graph_strategy = plan.library.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        eager = plan.library.DynamicShapesKernelSpecializationStrategy.EAGER
        config.dynamic_shapes_kernel_specialization_strategy = eager
    cache = RuntimeCache(config, cache_path("kernels", f"{plan.digest}.bin"))
    return Execution(plan, config, cache.save, captures)

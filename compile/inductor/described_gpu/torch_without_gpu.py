"""Has torch say that there is a GPU, which is described only: tensors on it have no memory, code for it is compiled,
not run. For a process of its own: it can use a real GPU no more."""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import triton_backend
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from ....kernels.native import CompilerError, find_compiler
from ...gpus import GPU

CUDA = "13.0"  # of which torch is said to be, where it is of none


@contextlib.contextmanager
def described_gpu(gpu: GPU) -> Iterator[None]:
    """In the block, torch says that there is this GPU and no other. Raises CompilerError."""
    load_guard()
    with contextlib.ExitStack() as stack:
        for name, value in _answers(gpu).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
            if hasattr(CudaInterface, name.removeprefix("_")):
                stack.enter_context(patch.object(CudaInterface, name.removeprefix("_"), staticmethod(value)))
        properties = patch.object(CudaInterface.Worker, "get_device_properties", lambda *_: _properties(gpu))
        target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", gpu.arch, 32))
        for replaced in (
            properties,
            patch.object(torch.version, "cuda", torch.version.cuda or CUDA),
            patch.object(fake_tensor, "init_gpu_context", lambda _: None),
            patch.object(FakeTensorMode, "avoid_device_init", True),
            patch.object(driver, "_active", target),
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            stack.enter_context(replaced)
        for caches in (DeviceProperties.create, triton_backend):
            caches.cache_clear()
            stack.callback(caches.cache_clear)
        yield


@functools.cache
def load_guard() -> None:
    """Let this process have CUDA tensors without memory, from now on. Raises CompilerError."""
    torch_folder, source = Path(torch.__file__).parent, Path(__file__).with_name("guard.cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libguard.so"
        command = [find_compiler(), str(source), "-o", str(library), *flags]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise CompilerError(f"compiler: {' '.join(command)} failed:\n{run.stderr}")
        ctypes.CDLL(str(library))


def _answers(gpu: GPU) -> dict[str, Any]:
    """What functions of `torch.cuda` say of the GPU."""
    capability = divmod(gpu.arch, 10)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: _properties(gpu),
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: gpu.name,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(0),
        "set_rng_state": lambda *_: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "is_bf16_supported": lambda *_, **__: True,
    }


def _properties(gpu: GPU) -> Any:
    """The GPU as `torch.cuda.get_device_properties` tells it."""
    major, minor = divmod(gpu.arch, 10)
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=gpu.shared,
        total_memory=80 * 2**30,
        L2_cache_size=50 * 2**20,
    )

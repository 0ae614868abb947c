"""A GPU that is described only: models on it have no memory, and code for it is generated, not run."""

import ast
import contextlib
import copy
import ctypes
import dataclasses
import json
import operator
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from models import tiny_model
from specstep.compile import inductor, stored_program
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.export import export_program
from specstep.compile.source import Source
from torch import nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import graph
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._triton import triton_backend
from transformers import PreTrainedModel
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

# What Inductor asks of a device, by compute capability: A100, H100, RTX 5090.
MULTIPROCESSORS = {80: 108, 90: 132, 120: 170}


def load_guard(folder: Path) -> None:
    """Let this process have CUDA tensors without memory."""
    torch_folder, library = Path(torch.__file__).parent, folder / "libfakecuda.so"
    source = Path(__file__).with_suffix(".cpp")
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run(["c++", str(source), "-o", str(library), *flags], check=True)
    ctypes.CDLL(str(library))


def properties(arch: int) -> Any:
    """Of a device of a compute capability such as 90, as torch tells them."""
    return SimpleNamespace(
        name=f"fake sm_{arch}",
        major=arch // 10,
        minor=arch % 10,
        multi_processor_count=MULTIPROCESSORS[arch],
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=1536 if arch == 120 else 2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=101376 if arch == 120 else 232448 if arch == 90 else 166912,
        total_memory=80 * 2**30,
        L2_cache_size=50 * 2**20,
    )


@contextlib.contextmanager
def described_gpu(arch: int) -> Iterator[None]:
    """In the block, torch says that there is a GPU of this compute capability."""
    device, capability = properties(arch), divmod(arch, 10)
    said = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: device,
        "get_device_capability": lambda *_: capability,
        "get_device_name": lambda *_: device.name,
        "synchronize": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(0),
        "set_rng_state": lambda *_: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "is_bf16_supported": lambda *_, **__: True,
    }
    with contextlib.ExitStack() as stack:
        for name, value in said.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
            if hasattr(CudaInterface, name):
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(value)))
        stack.enter_context(mock.patch.object(CudaInterface.Worker, "get_device_properties", lambda *_: device))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32))
        stack.enter_context(mock.patch.object(driver, "_active", target))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        for caches in (DeviceProperties.create, triton_backend):
            caches.cache_clear()
            stack.callback(caches.cache_clear)
        yield


def without_memory(module: nn.Module) -> nn.Module:
    """A copy of a module whose tensors lie on the described GPU; what was one tensor still is."""
    module, moved = copy.deepcopy(module), dict[int, torch.Tensor]()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and id(tensor) not in moved:
                        there = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                        moved[id(tensor)] = nn.Parameter(there, False) if held is part._parameters else there
                    held[name] = None if tensor is None else moved[id(tensor)]
    return module


def traced(model: PreTrainedModel, **options: Any) -> dict[str, ExportedProgram]:
    """The programs of an engine for a described GPU."""
    config = make_config(options)
    graphs = assemble(Source("model", model.to(getattr(torch, config.dtype)).eval(), None), config)
    spec = dataclasses.replace(graphs.spec, device="cuda")
    step, prefill = without_memory(nn.ModuleList([graphs.step, graphs.prefill])).children()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        return {"step": export_program(step, spec), "prefill": export_program(prefill, spec)}


class _Generated(Exception):
    """Carries the code of a program out of the compiler, which would go on to run it."""


def _generate(lowering: GraphLowering) -> NoReturn:
    lowering.cpp_wrapper = False
    code, _ = lowering.codegen()
    raise _Generated(code.value)


class _Here(TorchDispatchMode):
    """Makes new tensors on the CPU, whatever device they are for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if "device" in (kwargs or {}) else {})})


class _Folder(joint_graph.UniformValueConstantFolder):
    """Finds tensors of one value, which are computed with one element each."""

    def __init__(self, *given: Any, **more: Any):
        with _Here():
            super().__init__(*given, **more)

    def run(self) -> Any:
        with _Here():
            return super().run()


def generated(exported: Mapping[str, ExportedProgram]) -> dict[str, str]:
    """Of each program the code that calls its kernels, with their sources in it. The programs are changed."""
    names: dict[int, str] = {}  # of weights by their storage: the programs share them
    for program in exported.values():
        _in_one_mode(program)
        names |= {tensor.untyped_storage()._cdata: name for name, tensor in program.state_dict.items()}
    codes = {}

    def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
        return names.get(tensor.untyped_storage()._cdata), tensor.shape

    def capture(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
        _in_one_mode(program)  # weights that were joined were joined for another program
        try:
            compile_one(program, path, config)
        except Exception as error:
            codes[path.stem] = _code(error)

    compile_one = inductor._compile
    with (
        mock.patch.object(inductor, "_compile", capture),
        mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", _generate),
        mock.patch.object(PythonWrapperCodegen, "codegen_inputs", lambda _: None),  # C++ alone knows sizes of 64 * n
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block", lambda _: None),
        mock.patch.object(graph, "is_same_tensor", operator.is_),
        mock.patch.object(joint_graph, "UniformValueConstantFolder", _Folder),
        mock.patch.object(stored_program, "identity", identity),
    ):
        inductor.compile_programs(dict(exported), Path(), "cuda")
    return codes


def _in_one_mode(exported: ExportedProgram) -> None:
    """Have an exported program hold its own placeholders' values, which have no memory either, as its weights and
    inputs: the compiler wants all of one mode."""
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    for spec in exported.graph_signature.input_specs:
        for held in (exported.state_dict, exported.constants):
            if spec.target in held:
                value = values[spec.arg.name]
                held[spec.target] = nn.Parameter(value, False) if spec.kind == InputKind.PARAMETER else value
    exported._example_inputs = (tuple(values[name] for name in exported.graph_signature.user_inputs), {})


def _code(error: Exception) -> str:
    found = error if isinstance(error, _Generated) else getattr(error, "inner_exception", None)
    if not isinstance(found, _Generated):
        raise error
    return str(found.args[0])


def launches(code: str) -> list[str]:
    """Names of the kernels that a program launches, in order."""
    body = code[code.index("def call(") :]
    found = re.findall(r"^\s+(\w+)\.run\(|^\s+((?:extern_kernels|torch\.ops|aten)\.[\w.]+)\(", body, re.MULTILINE)
    return [ours or torchs for ours, torchs in found]


def compile_kernels(code: str) -> int:
    """Compile every kernel of a program to machine code for the described GPU -> how many there are."""
    sources = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", code, re.DOTALL))
    for name, source in sources.items():
        kernel = getattr(PyCodeCache.load(ast.literal_eval(f"'''{source}'''")), name)
        kernel.precompile(warm_cache_only=True)
    return len(sources)


def main(model: str, options: str, arch: str) -> None:
    """Print as JSON what an engine's programs launch on a GPU that is described only, and what they allocate."""
    load_guard(Path(tempfile.mkdtemp()))
    with described_gpu(int(arch)):
        codes = generated(traced(tiny_model(model), **json.loads(options)))
        found = {
            name: {
                "launches": launches(code),
                "kernels": compile_kernels(code),
                "allocated": re.findall(r"empty_strided_cuda\((\(.*?\))", code),
            }
            for name, code in codes.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The ops in a graph: one node each when exported, their bodies in the compiled code, caches written in place."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from specstep.kernels.accept.op import accept
from specstep.kernels.compact.op import compact
from specstep.kernels.native import c_shims
from specstep.kernels.tree_attention.op import tree_attention
from specstep.kernels.tree_layout.op import tree_layout
from torch import Tensor
from torch.export import Dim

NODES, HEAD_DIM, BUFFER = 9, 32, 256


class Step(torch.nn.Module):
    """A verify pass of one layer without its projections."""

    def forward(self, tokens: Tensor, parents: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Any:
        valid = tokens >= 0
        ancestors, depths = tree_layout(parents, valid)
        out = tree_attention(q, k, v, lengths, depths, ancestors, depths, HEAD_DIM**-0.5, window=30)
        choice = (out.sum((2, 3)) > 0).long()
        path, accepted = accept(tokens, parents, valid, ancestors, depths, choice, 4)
        compact([k, v], lengths, path, accepted)
        return out, path, accepted


def inputs(seed: int, device: str, batch: int = 2, slots: int = 64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (batch, NODES), generator=generator)
    parents = (torch.rand(batch, NODES, generator=generator) * torch.arange(NODES)).long()
    parents[:, 0] = -1
    q = torch.randn(batch, 4, NODES, HEAD_DIM, generator=generator)
    # Prefix views of larger buffers, as a session passes them.
    k, v = (torch.randn(batch, 2, BUFFER, HEAD_DIM, generator=generator).to(device)[:, :, :slots] for _ in range(2))
    lengths = torch.tensor([slots - 24, 3, 0, slots - 9][:batch], device=device)
    return tokens.to(device), parents.to(device), q.to(device), k, v, lengths


def dynamic_shapes() -> tuple[Any, ...]:
    """Rows and slots as a step has them."""
    rows, slots = {0: Dim("rows", min=1, max=8)}, {2: 64 * Dim("steps", min=1, max=BUFFER // 64 - 1)}
    return (rows, rows, rows, rows | slots, rows | slots, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_exported_and_compiled(device: str, dynamic: bool, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    shapes = dynamic_shapes() if dynamic else None
    program = torch.export.export(Step(), inputs(0, device, slots=128), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    ops = ["tree_layout", "tree_attention", "accept", "compact"]
    assert [name for name in names if name.startswith("specstep.")] == [f"specstep.{op}.default" for op in ops]

    package = aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    compiled = aoti_load_package(package)
    moved = 0
    for seed in range(8):
        size = {"batch": 1 + seed % 4, "slots": 64 * (1 + seed % 3)} if dynamic else {"slots": 128}
        eager_inputs, compiled_inputs, before = (inputs(seed, device, **size) for _ in range(3))
        expected, got = Step()(*eager_inputs), compiled(*compiled_inputs)
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(got[1:], expected[1:], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(compiled_inputs[3:5], eager_inputs[3:5], strict=True))
        moved += not torch.equal(compiled_inputs[3], before[3])
    assert moved > 0


class Layers(torch.nn.Module):
    """Two layers' attention over caches that it writes to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: Tensor, parents: Tensor) -> Any:
        ancestors, depths = tree_layout(parents, parents < NODES)
        slots = lengths[:, None] + torch.arange(NODES)
        k.index_put_((torch.arange(2)[:, None, None], torch.arange(2)[:, None], slots[:, None]), q[:, ::2] + 1)
        where = (lengths, depths, ancestors, depths)
        first = tree_attention(q, k, v, *where, 0.3)
        return tree_attention(first.transpose(1, 2), k, v, *where, 0.2, window=30, softcap=9.0, sinks=sinks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_on_a_cpu_is_a_call_of_our_function(dtype: torch.dtype, tmp_path: Path) -> None:
    """With the bits that it has when nothing is compiled."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    def given(slots: int) -> tuple[Tensor, ...]:
        _, parents, q, k, v, lengths = inputs(3, "cpu", slots=slots)
        return q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor([-1.0, 0, 1, 2]).to(dtype), lengths, parents

    slots = {2: 64 * Dim("steps", min=1, max=BUFFER // 64 - 1)}
    program = torch.export.export(Layers(), given(128), dynamic_shapes=({}, slots, slots, {}, {}, {}))
    package = aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "layers.pt2"),
        inductor_configs={"aot_inductor.custom_ops_to_c_shims": c_shims()},
    )
    with zipfile.ZipFile(package) as files:
        code = "".join(files.read(name).decode() for name in files.namelist() if name.endswith("wrapper.cpp"))
    assert code.count("aoti_torch_cpu_tree_attention_native(") >= 2
    compiled = aoti_load_package(package)
    for size in (64, 128, 192):
        ours, plain = given(size), given(size)
        assert torch.equal(compiled(*ours), Layers()(*plain))
        assert torch.equal(ours[1], plain[1]) and not torch.equal(ours[1], given(size)[1])


# Exports a step's choice and its likeliest tokens on a GPU that is not there, with dynamic rows, then traces the ops'
# bodies as Inductor does. In a process of its own: others interpret Triton here.
ON_A_GPU = """
import warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
import torch, triton
from specstep.kernels.choose.op import choose
from specstep.kernels.model_sizes import ModelSizes
from specstep.kernels.plugins import PLUGINS
from specstep.kernels.top_log_probs.op import top_log_probs
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from triton.backends.compiler import GPUTarget

triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
SIZES, KINDS = ModelSizes("float16", 64, 64, nodes=8, batch=2), {"float": "float16"}

class Choice(torch.nn.Module):
    def forward(self, chosen, listed):
        return choose(*chosen), top_log_probs(*listed[:6], None, 4, *listed[6:])

def inputs(name):
    kinds = next(plugin for plugin in PLUGINS if plugin.name == name).inputs.values()
    dtypes = [getattr(torch, KINDS.get(kind, kind)) for kind in kinds]
    sizes = [tuple(size) for size in SIZES.inputs[name]]
    return [torch.zeros(size, dtype=dtype, device="cuda") for size, dtype in zip(sizes, dtypes)]

with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
    given = (inputs("choose"), [*inputs("top_log_probs")[:6], *inputs("top_log_probs")[7:]])
    rows = tuple([{0: Dim("rows", min=1, max=8)} for _ in tensors] for tensors in given)
    exported = torch.export.export(Choice(), given, dynamic_shapes=rows)
    print(*(str(node.target) for node in exported.graph.nodes if str(node.target).startswith("specstep")))
    graph, _ = aot_export_module(Choice(), given, trace_joint=False)
for node in graph.graph.nodes:
    if "kernel_idx" in node.kwargs:
        print(*node.kwargs["tensors_to_clone"])
"""


def test_a_gpu_graph_has_kernels_that_write_their_outputs_alone() -> None:
    """A kernel that seems to write an input would have it copied in every step."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", ON_A_GPU], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "specstep.choose.default specstep.top_log_probs.default", "choice scratch", "tokens log_probs total"
    ]  # fmt: skip


# Compiles every plugin's kernel as it is, and as Inductor copies it into its own file, with all that it calls.
COPIED = """
import dataclasses, importlib.util, re, sys
from pathlib import Path
from specstep.kernels.case import compile_kernel
from specstep.kernels.model_sizes import ModelSizes
from specstep.kernels.plugins import PLUGINS
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

def code(case):
    lines = compile_kernel(case, 90).asm["ttir"].splitlines()  # names and places in the source are left out
    return [re.sub(r" loc[(].*|%[A-Za-z_0-9]+", "", line) for line in lines if not line.startswith("#loc")]

model = ModelSizes("float16", 64, 64, nodes=8)
for plugin in PLUGINS:
    shapes = plugin.sized(model.inputs[plugin.name], model.attributes)
    case = plugin.case(model.dtype, shapes, model.attributes)
    file = Path(sys.argv[1], f"{plugin.name}.py")
    source = user_defined_triton_kernel_transitive_closure_source_code(case.kernel)
    file.write_text("import triton\\nimport triton.language as tl\\n@triton.jit\\n" + source)
    spec = importlib.util.spec_from_file_location(plugin.name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    copied = dataclasses.replace(case, kernel=getattr(module, case.kernel.__name__))
    assert code(copied) == code(case), plugin.name
"""


@pytest.mark.slow
def test_kernels_are_the_same_where_inductor_copies_them(tmp_path: Path) -> None:
    """It takes functions by their names: of two in different modules that share one, only the first is kept."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    run = subprocess.run([sys.executable, "-c", COPIED, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]

"""Compiles each kind of layer once, and writes its function into the code of the program that calls it.

Inductor makes a program of a layer as of any graph: a function `run_impl`, in C++, and its kernels. The function's body
becomes one that the whole program calls, and its kernels go to those of the program.
"""

import contextlib
import gc
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from torch._export.utils import _compiling_state_context
from torch._inductor.codecache import AotCodeCompiler
from torch._inductor.compile_fx import compile_fx_aot
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import make_fallback
from torch.export import ExportedProgram
from torch.fx import Node

from ..heap import give_back
from .compiled_in_parts import compiled_in_parts
from .interface_once import without_interface
from .layer_loops import LayerLoop, join_calls
from .layer_ops import LayerKind
from .layers import outline_layers

SHIMS = "aot_inductor.custom_ops_to_c_shims"
BODY = re.compile(r"^void AOTInductorModel::run_impl\(.*?^\) \{\n(.*?)^\} // AOTInductorModel::run_impl$", re.M | re.S)
KERNEL = re.compile(r"\bcpp_(?=fused\w*\()")
CALLED = re.compile(r"\bcpp_fused\w*(?=\()")
DECLARED = re.compile(r'^extern "C"  void  [^;{]*;', re.M)
CACHED = re.compile(r"^CACHE_TORCH_\w+\(\w+\);", re.M)
# Lines of a body that are for a whole program.
FOR_PROGRAMS = re.compile(r"^    (__check_inputs_outputs\(.*|\[\[maybe_unused\]\] auto& kernels = .*)\n", re.M)
# What a function of its own has not: other members, weights, operators that a runtime looks up by name.
MEMBERS = re.compile(r"\bthis->|\bconstants_\b|\bproxy_executor\b|\bkernels\b|\bstream\b")
FUNCTION = """
namespace torch::aot_inductor {{
static void {op}(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {{
    constexpr int32_t device_index = -1;
{body}}}
}} // namespace torch::aot_inductor
extern "C" __attribute__((visibility("hidden"))) {declaration} {{
    AtenTensorHandle given[] = {{{inputs}}}, made[{outputs_count}];
    torch::aot_inductor::{op}(given, made);
    {outputs}
    return AOTI_TORCH_SUCCESS;
}}
"""
LOOP = """
extern "C" __attribute__((visibility("hidden"))) {declaration} {{
    AtenTensorHandle given[] = {{{inputs}}}, made[{outputs_count}];
    torch::aot_inductor::RAIIAtenTensorHandle before[{outputs_count}];
    for (int64_t layer = 0; layer < x{own}_count; layer++) {{
        {next}
        torch::aot_inductor::{op}(given, made);
        for (int result = 0; result < {outputs}; result++) {{
            before[result] = torch::aot_inductor::RAIIAtenTensorHandle(made[result]);
        }}
        {carried}
    }}
    {results}
    return AOTI_TORCH_SUCCESS;
}}
"""
# A program owns what it is called with, and each handle of its own is a new tensor: 6 us of a layer of SmolLM2-135M.
OWNED = re.compile(r"^    auto inputs = steal_from_raw_handles_to_raii_handles\(.*\n", re.M)
INPUT = re.compile(r"^    auto (\w+) = std::move\(inputs\[(\d+)\]\);$", re.M)
CLEARED = re.compile(r"^    inputs\.clear\(\);\n", re.M)
BORROWED = """
namespace torch::aot_inductor {
struct Borrowed : ConstantHandle {
    using ConstantHandle::ConstantHandle;
    void reset() {}
    AtenTensorHandle release() const {
        AtenTensorHandle own;
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(get(), &own));
        return own;
    }
};
} // namespace torch::aot_inductor
"""


class LayerCode:
    """The C++ of kinds of layers, as it was made of them with Inductor's settings."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.shims: dict[Any, list[str]] = {}
        self.functions: list[str] = []
        self.kernels: list[str] = []
        self.cached: set[str] = set()

    def add(self, kind: LayerKind) -> bool:
        """Compile a kind -> whether its code can be a function."""
        made: list[tuple[str, str]] = []

        def catch(graph: Any, wrapper: str, kernels: str, *_: object, **__: object) -> list[str]:
            made.append((wrapper, kernels))
            return []

        inputs = [node.meta["val"] for node in kind.module.graph.find_nodes(op="placeholder")]
        with patch.object(AotCodeCompiler, "compile", catch), _compiling_state_context():
            compile_fx_aot(kind.module, inputs, config_patches=self.config)
        (wrapper, kernels), *_ = made
        found = BODY.search(wrapper)
        if found is None:
            return False
        body = FOR_PROGRAMS.sub("", found[1]).replace("this->device_idx_", "device_index")
        body, owned = OWNED.subn("", CLEARED.sub("", INPUT.sub(r"    Borrowed \1(input_handles[\2]);", body)))
        declared = "\n".join(DECLARED.findall(wrapper))
        if owned != 1 or MEMBERS.search(body) or not set(CALLED.findall(body)) <= set(CALLED.findall(declared)):
            return False
        declaration, function = _function(kind, len(inputs), body)
        make_fallback(kind.overload, layout_constraint=_computed_once)
        self.shims[kind.overload] = [declaration]
        self.cached.update(CACHED.findall(wrapper))
        self.kernels.append(KERNEL.sub(f"{kind.op}_", kernels))
        self.functions.append(KERNEL.sub(f"{kind.op}_", declared + function))
        return True

    def add_loop(self, loop: LayerLoop) -> None:
        """Write a loop over layers of a kind whose function is there."""
        make_fallback(loop.overload, layout_constraint=_computed_once)
        declaration, function = _loop(loop)
        self.shims[loop.overload] = [declaration]
        self.functions.append(function)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Within it, the program that is compiled has these functions."""
        compile_code = AotCodeCompiler.compile

        def compile_all(graph: Any, wrapper: str, kernels: str, *given: Any, **named: Any) -> Any:
            missing = sorted(self.cached - set(CACHED.findall(wrapper)))
            gc.collect()  # the C++ compiler takes as much again
            give_back()
            wrapper = "\n".join([wrapper, *missing, *([BORROWED] if self.functions else []), *self.functions])
            kernels = "\n".join([kernels, *self.kernels])
            own = without_interface(wrapper)
            with compiled_in_parts(kernels, linked=own is not None) as first:
                return compile_code(graph, wrapper if own is None else own, first, *given, **named)

        with patch.object(AotCodeCompiler, "compile", compile_all):
            yield


@contextlib.contextmanager
def layers_compiled_once(program: ExportedProgram, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Have each kind of layer of a program compiled once. The program, which calls them then, is to be compiled within
    it, with the settings that it gives."""
    code = LayerCode(config)
    for loop in join_calls(program.graph, outline_layers(program, code.add)):
        code.add_loop(loop)
    with code.written():
        yield config | {SHIMS: config.get(SHIMS, {}) | code.shims}


def _computed_once(call: Node, *given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What layers are called with, laid out as their code was compiled for it. Inductor would compute what is cheap, as
    the cosines of positions, for each layer anew."""

    def lay_out(value: Any, node: Any) -> Any:
        if isinstance(value, list | tuple):
            return [*map(lay_out, value, node)]
        value.realize()
        return ExternKernel.require_exact_strides(value, node.meta["val"].stride())

    return tuple(map(lay_out, given, call.args)), {}


def _declaration(op: str, given: Sequence[str], outputs: int) -> str:
    """The C function of an op, as AOTInductor's convention names it."""
    made = [f"AtenTensorHandle* out{index}" for index in range(outputs)] or ["void* nothing"]
    return f"AOTITorchError aoti_torch_cpu_{op}({', '.join([*given, *made])})"


def _function(kind: LayerKind, inputs: int, body: str) -> tuple[str, str]:
    """The declaration of a kind's function, and the function."""
    declaration = _declaration(kind.op, [f"AtenTensorHandle x{index}" for index in range(inputs)], kind.outputs)
    return declaration, FUNCTION.format(
        op=kind.op,
        body=body,
        declaration=declaration,
        inputs=", ".join(f"x{index}" for index in range(inputs)),
        outputs=" ".join(f"*out{index} = made[{index}];" for index in range(kind.outputs)),
        outputs_count=max(kind.outputs, 1),
    )


def _loop(loop: LayerLoop) -> tuple[str, str]:
    """The declaration of a loop's function, and the function."""
    places = range(len(loop.overload._schema.arguments))
    given = [
        f"const AtenTensorHandle* x{x}, int64_t x{x}_count" if x in loop.own else f"AtenTensorHandle x{x}"
        for x in places
    ]
    declaration = _declaration(loop.op, given, loop.kind.outputs)
    return declaration, LOOP.format(
        op=loop.kind.op,
        declaration=declaration,
        own=min(loop.own),
        inputs=", ".join("nullptr" if x in loop.own else f"x{x}" for x in places),
        next=" ".join(f"given[{x}] = x{x}[layer];" for x in sorted(loop.own)),
        carried=" ".join(f"given[{x}] = made[{result}];" for x, result in loop.carried.items()),
        results=" ".join(f"*out{index} = before[{index}].release();" for index in range(loop.kind.outputs)),
        outputs=loop.kind.outputs,
        outputs_count=max(loop.kind.outputs, 1),
    )

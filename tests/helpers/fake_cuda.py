"""What the programs of an engine launch and allocate on a GPU that is described only: an engine is built for it as far
as their code, in Python, which is easier to read than the C++ that an engine has."""

import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
from models import tiny_model
from specstep.compile.assemble import Assembled, assemble
from specstep.compile.config import make_config
from specstep.compile.inductor.described_gpu.lower import lowers_without
from specstep.compile.inductor.programs import compile_package, compile_programs
from specstep.compile.ranks.share import share
from specstep.compile.source import Source
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch.export import ExportedProgram


class _Generated(Exception):
    """Carries the code of a program out of the compiler, which would go on to compile it."""


def _generate(lowering: GraphLowering) -> NoReturn:
    lowering.cpp_wrapper = False
    code, _ = lowering.codegen()  # compiles the kernels
    raise _Generated(code.value)


def generated(graphs: Assembled) -> dict[str, str]:
    """Of each program the code that calls its kernels, with their sources in it."""
    codes = {}

    def capture(program: ExportedProgram, path: Path, config: dict[str, Any]) -> None:
        try:
            compile_package(program, path, config)
        except Exception as error:
            codes[path.stem] = _code(error)

    with (
        lowers_without(graphs.gpu, capture) as (export, compile_one),
        mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", _generate),
        mock.patch.object(PythonWrapperCodegen, "codegen_inputs", lambda _: None),  # C++ alone knows sizes of 64 * n
    ):
        exported = {name: export(program, graphs.spec) for name, program in graphs.programs.items()}
        compile_programs(exported, Path(), "cuda", graphs.precision, compile_one)
    return codes


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


def main(model: str, options: str) -> None:
    """Print as JSON what an engine's programs launch on a GPU that is described only, and what they allocate."""
    config = make_config({"device": "cuda"} | json.loads(options))
    source = Source("model", tiny_model(model).to(getattr(torch, config.dtype)).eval(), None)
    graphs = assemble(source, config)
    found = {
        name: {
            "launches": launches(code),
            "kernels": len(re.findall(r"async_compile\.triton\(", code)),
            "gathers": len(re.findall(r"= torch\.ops\.specstep\.gather_ranks", code)),
            "allocated": re.findall(r"empty_strided_cuda\((\(.*?\))", code),
        }
        for name, code in generated(share(graphs) if config.ranks > 1 else graphs).items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compile every Triton kernel to machine code without a GPU and report registers and spills.

    python -m specstep.kernels.compile_cubin [--arch 80 90 120] [--out FOLDER]

The cases are those of the TensorRT plugins, with the launchers' own block sizes. `stack` is the bytes a thread keeps in
local memory: these kernels have no local arrays, so it is what spilled.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .case import Case, compile_kernel
from .model_sizes import ModelSizes
from .plugins import PLUGINS
from .tree_attention.plugin import AttendSplit

ARCHITECTURES = (80, 90, 120)  # A100; H100 and H200; RTX 50

MODELS = (
    ModelSizes("float16", 64, 64),
    ModelSizes("float32", 256, 256, vocabulary=50257),  # GPT-2's: rows of logits that start anywhere
    ModelSizes("bfloat16", 80, 80),
    ModelSizes("bfloat16", 128, 128),
    ModelSizes("bfloat16", 256, 256),
    ModelSizes("float32", 64, 64),
    ModelSizes("float32", 128, 128),
    ModelSizes("bfloat16", 128, 128, nodes=1),
    ModelSizes("bfloat16", 128, 128, nodes=8),
    ModelSizes("bfloat16", 128, 128, window=4096, softcap=50.0),
    ModelSizes("bfloat16", 192, 128, heads=1),  # DeepSeek-V3
    ModelSizes("bfloat16", 512, 512),  # Gemma 4's global layers
    ModelSizes("float32", 512, 512),
)


@dataclass(frozen=True)
class KernelUsage:
    """What a kernel takes on one architecture, and its machine code."""

    name: str  # of the case
    arch: int  # as 90 for sm_90
    registers: int  # of a thread
    stack: int  # bytes of a thread; more than 0 is spilled
    shared: int  # bytes of shared memory of a block
    cubin: bytes = field(repr=False)  # machine code


def cases() -> Iterator[Case]:
    """Every plugin's kernel, that of the attention for each of MODELS; and the one that torch launches for many caches
    where a plugin has one cache."""
    for plugin in PLUGINS:
        has_dtype = "float" in plugin.inputs.values()
        for model in MODELS if isinstance(plugin, AttendSplit) else MODELS[: 2 if has_dtype else 1]:
            shapes = plugin.sized(model.inputs[plugin.name], model.attributes)
            case = plugin.case(model.dtype, shapes, model.attributes)
            yield replace(case, name=f"{case.name} {model}" if has_dtype else f"{case.name} T={model.nodes}")
    yield from (_compact_case(), _ngram_case(), *_linear_attention_cases(), _wkv_case())


def _compact_case() -> Case:
    from .compact.triton import CACHES_PER_LAUNCH, compact_kernel

    pointers = {"lengths": "*i64", "path": "*i64", "accepted": "*i64"}
    pointers |= {f"cache_{i}": "*fp16" for i in range(CACHES_PER_LAUNCH)}
    constants = {"CACHES": CACHES_PER_LAUNCH, "D": 128, "BLOCK_P": 16, "BLOCK_D": 128, "stride_d": 1}
    return Case(f"compact float16 D=128 x{CACHES_PER_LAUNCH}", compact_kernel, pointers, constants)


def _linear_attention_cases() -> Iterator[Case]:
    from .fold.triton import fold_kernel
    from .linear_attention.blocks import blocks
    from .linear_attention.triton import linear_attention_kernel

    integers = dict.fromkeys(("parents", "path", "count"), "*i64")
    # Sizes of Qwen3.5, Granite 4 and Mamba, and what of them is not None.
    for n, p, decays, given in ((128, 128, 1, "beta"), (128, 64, 1, None), (16, 64, 64, "rates")):
        sizes = blocks(n, p)
        options = {"num_warps": sizes.pop("num_warps")}
        constants = {"N": n, "P": p, "DECAYS": decays} | sizes
        floats = dict.fromkeys(["query", "key", "value", "decay", "state", "states", "out", "update"], "*fp32")
        pointers = floats | integers | ({given: "*fp32"} if given else {})
        rates, beta = ({name: None} if name != given else {} for name in ("rates", "beta"))
        name = f"N={n} P={p}"
        yield Case(f"linear_attention {name}", linear_attention_kernel, pointers, constants | rates | beta, options)
        yield Case(f"fold {name}", fold_kernel, pointers, constants | rates, options)


def _wkv_case() -> Case:
    from .wkv.triton import BLOCK_C, wkv_kernel

    floats = dict.fromkeys(["key", "value", "decay", "first", "state", "states", "out"], "*fp32")
    return Case("wkv", wkv_kernel, floats | {"parents": "*i64"}, {"BLOCK_C": BLOCK_C})


def _ngram_case() -> Case:
    from .ngram.triton import ngram_kernel

    integers = "history lengths context prediction predicted expected keys learned tokens best places"
    pointers = dict.fromkeys(integers.split(), "*i64") | {"bigrams": "*i32", "trigrams": "*i32"}
    pointers |= dict.fromkeys(("concentrations", "trust", "probability", "scores"), "*fp32")
    constants = {"TOP_K": 2, "N": 4, "M": 4, "E": 8, "C": 45, "HAS_TABLES": True, "HAS_LEARNED": True}
    constants |= {"BLOCK_S": 512, "BLOCK_M": 4, "BLOCK_E": 8, "BLOCK_C": 64}
    return Case("ngram matches=4 entries=8", ngram_kernel, pointers, constants, aligned_strides=False)


def compile_case(case: Case, arch: int) -> KernelUsage:
    """Compile one case for one architecture, e.g. 90 for sm_90, and measure it."""
    compiled = compile_kernel(case, arch)
    registers, stack = _resources(compiled.asm["cubin"])
    return KernelUsage(case.name, arch, registers, stack, compiled.metadata.shared, compiled.asm["cubin"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, by the cuobjdump that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump --dump-resource-usage: expected 'REG:n STACK:n', got {report!r}")
    return int(found[1]), int(found[2])


def table(usages: Sequence[KernelUsage]) -> str:
    """A Markdown table."""
    lines = ["| kernel | target | registers | stack bytes | shared bytes |", "|---|---|---|---|---|"]
    lines += [f"| {u.name} | sm_{u.arch} | {u.registers} | {u.stack} | {u.shared} |" for u in usages]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specstep.kernels.compile_cubin", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--out", type=Path, help="also write the cubins to this folder")
    options = parser.parse_args(arguments)
    usages = [compile_case(case, arch) for case in cases() for arch in options.arch]
    print(table(usages))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for usage in usages:
            stem = re.sub(r"[ =,]+", "-", usage.name)
            (options.out / f"{stem}-sm_{usage.arch}.cubin").write_bytes(usage.cubin)


if __name__ == "__main__":
    main()

"""Lower a flat program to TensorRT plans, by way of ONNX: with TensorRT for the GPU at hand, with TensorRT for RTX for
the compute capabilities that are named, on a machine that may have none."""

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...progress import OnProgress
from ...runtime.engine_file import EngineSpec
from ...runtime.tensorrt.driver import DriverError, driver
from ...runtime.tensorrt.library import load_library
from ..assemble import Assembled
from ..lowered import Lowered
from ..onnx.lower import lower as lower_to_onnx
from .builder import BuiltPlan, ShapeProfile, Target, build_plan
from .graph import fix_sizes, load_graph, use_plugins, without_functions

SHORT = 64  # prompt tokens of a call up to which the prefill has a profile of its own


def lower(graphs: Assembled, directory: Path, progress: OnProgress) -> Lowered:
    """Write NAME.plan for each program, weights included."""
    spec = graphs.spec
    if spec.recurrent:  # TensorRT for RTX 1.2 ends the process over the ONNX functions of our ops
        raise BuildError(
            f"backend: expected inductor or onnx for a model with recurrent layers, got {spec.config['backend']}, "
            "which has no kernels for their states"
        )
    target = make_target(spec.config)
    version = f"{target.backend} {load_library(target.backend).__version__}"
    programs, plans = {}, {}
    with tempfile.TemporaryDirectory(prefix="onnx-", dir=directory) as work:
        lowered = lower_to_onnx(graphs, Path(work), progress)
        for name, program in lowered.programs.items():
            plan, shapes = _plan(Path(work) / program.file, spec, target, progress)
            (directory / f"{name}.plan").write_bytes(plan.data)
            programs[name] = replace(program, file=f"{name}.plan")
            plans[name] = describe_plan(plan, shapes)
            progress(
                f"{name}: {plan.layers} layers, {sum(plan.plugins.values())} plugins, built in {plan.seconds:.0f} s"
            )
    library = {target.backend: version.split()[1]}
    capabilities = [f"{capability // 10}.{capability % 10}" for capability in target.capabilities]
    details = {"plans": plans, "compute_capability": capabilities}
    inexact = ["TensorRT rounds as its kernels do"]
    return Lowered(programs, lowered.stages, {"libraries": [version]}, lowered.versions | library, inexact, details)


def make_target(config: dict[str, Any]) -> Target:
    """The target of an engine's configuration. Raises BuildError for a library, GPU or capability that is missing."""
    backend = config["backend"]
    trt = load_library(backend)
    named = tuple(dict.fromkeys(int(name.replace(".", "")) for name in config["compute_capability"] or ()))
    if backend == "tensorrt":
        return Target(backend, (_device_capability("device: TensorRT builds with the GPU that will run the engine"),),
                      config["plugins"])  # fmt: skip
    members = (name for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    known = sorted(int(name.removeprefix("SM")) for name in members)
    capabilities = named or (_device_capability("compute_capability: name one, as --compute-capability 8.9"),)
    odd = [capability for capability in capabilities if capability not in known]
    if odd:
        names = ", ".join(f"{capability // 10}.{capability % 10}" for capability in known)
        got = ", ".join(f"{capability // 10}.{capability % 10}" for capability in odd)
        raise BuildError(f"compute_capability: expected some of {names} for TensorRT for RTX, got {got}")
    return Target(backend, capabilities, config["plugins"])


def _device_capability(message: str) -> int:
    try:
        return driver().capability()
    except DriverError as error:
        raise BuildError(f"{message}: expected an NVIDIA GPU here, got none ({error})") from None


def _plan(path: Path, spec: EngineSpec, target: Target, progress: OnProgress) -> tuple[BuiltPlan, list[ShapeProfile]]:
    """The plan of an ONNX file. Caches are bound whole: TensorRT takes no view of a part of a larger buffer. A step
    verifies all nodes, for our plugins' kernels are compiled for one number of them."""
    model = load_graph(path)
    sizes = {"nodes": 1 + spec.nodes, "catch_up": 1 + spec.depth}
    caches = {tensor.name: {2: spec.most_slots} for tensor in spec.caches}
    fix_sizes(model, caches | {name: {0: size} for name, size in sizes.items()})
    plugins = use_plugins(model) if target.plugins else Counter[str]()
    path.write_bytes(without_functions(model, path.parent).SerializeToString())
    profiles = prefill_profiles(spec.prefill_chunk) if path.stem == "prefill" else step_profiles(spec.max_batch)
    return build_plan(path, target, plugins, profiles, progress), profiles


def prefill_profiles(chunk: int) -> list[ShapeProfile]:
    """Optimization profiles of a prefill: full chunks and, where chunks are long, short prompts."""
    if chunk <= SHORT:
        return [{"tokens": (2, chunk, chunk)}] if chunk > 2 else []
    return [{"tokens": (2, SHORT // 2, SHORT)}, {"tokens": (SHORT, chunk, chunk)}]


def step_profiles(batch: int) -> list[ShapeProfile]:
    """Optimization profiles of a step: one row, and up to all of them."""
    return [{"rows": (1, 1, 1)}, {"rows": (2, batch, batch)}] if batch > 1 else []


def describe_plan(plan: BuiltPlan, profiles: list[ShapeProfile]) -> dict[str, Any]:
    """A plan's entry in the manifest."""
    return {
        "layers": plan.layers,
        "plugins": plan.plugins,
        "tensors": plan.tensors,
        "profiles": profiles,
    }

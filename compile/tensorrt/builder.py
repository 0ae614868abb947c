"""One TensorRT plan from one ONNX file: parse, check that our ops became plugins, build."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import BuildError
from ...progress import OnProgress
from ...runtime.tensorrt.library import check_parser, load_library
from ...user_cache import cache_path, keep
from .plugins import register

ShapeProfile = dict[str, tuple[int, int, int]]  # dynamic dimension, as the ONNX file names it -> least, best and most


@dataclass(frozen=True)
class Target:
    """What plans are built for: backend "tensorrt" or "tensorrt-rtx", compute capabilities as 89 for 8.9."""

    backend: str
    capabilities: tuple[int, ...]
    plugins: bool


@dataclass(frozen=True)
class BuiltPlan:
    """A serialized plan, and what is in it: layers of the parsed network, plugin nodes by name, inputs and outputs."""

    data: Any
    layers: int
    plugins: dict[str, int]
    tensors: dict[str, dict[str, Any]]
    seconds: float


def build_plan(
    path: Path, target: Target, plugins: Counter[str], profiles: Sequence[ShapeProfile], progress: OnProgress
) -> BuiltPlan:
    """Build the plan of an ONNX file whose weights lie beside it. `plugins`: how many of each it must have, none where
    the target has no plugins. Raises BuildError."""
    started = time.perf_counter()
    trt = load_library(target.backend)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    with plugins_registered(trt, target):
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            raise BuildError(f"{path.stem}: {target.backend} cannot parse the graph: {_errors(parser)}")
        found = plugin_layers(trt, network)
        if found != plugins:
            raise BuildError(f"{path.stem}: plugins: expected {dict(plugins)}, got {dict(found)} in the parsed network")
        config = _builder_config(trt, builder, target)
        config.progress_monitor = _monitor(trt, path.stem, progress)
        for profile in profiles:
            _add_profile(builder, network, config, profile)
        with timing_cache(trt, config, target):
            data = builder.build_serialized_network(network, config)
    if data is None:
        raise BuildError(f"{path.stem}: {target.backend} cannot build the graph: {logger.last_error}")
    tensors = {
        tensor.name: {"shape": list(tensor.shape), "dtype": tensor.dtype.name} for tensor in _network_tensors(network)
    }
    return BuiltPlan(data, network.num_layers, dict(found), tensors, time.perf_counter() - started)


@contextlib.contextmanager
def plugins_registered(trt: Any, target: Target) -> Iterator[None]:
    """Our plugins are known to the library inside the block, if the target has any."""
    if not target.plugins:
        yield
    elif target.backend == "tensorrt-rtx":
        check_parser()
        from ...runtime.tensorrt.plugins import registered

        with registered(target.capabilities):
            yield
    else:
        register(trt, import_module("tensorrt.plugin"), target.capabilities[0])
        yield


def plugin_layers(trt: Any, network: Any) -> Counter[str]:
    """Plugin nodes of a network by plugin name."""
    layers = (network.get_layer(index) for index in range(network.num_layers))
    nodes = (layer for layer in layers if layer.type == trt.LayerType.PLUGIN_V3)
    names = Counter[str]()
    for layer in nodes:
        layer.__class__ = trt.IPluginV3Layer
        names[layer.plugin.plugin_name] += 1
    return names


def _network_tensors(network: Any) -> Iterator[Any]:
    yield from (network.get_input(index) for index in range(network.num_inputs))
    yield from (network.get_output(index) for index in range(network.num_outputs))


def _errors(parser: Any) -> str:
    """The parser's errors, in one line."""
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    return "; ".join(f"{error.node_operator() or 'graph'} {error.node_name()}: {error.desc()}" for error in errors)


def _logger(trt: Any) -> Any:
    """A logger that prints nothing and stores the last error, for the message of a BuildError."""

    class Logger(trt.ILogger):
        last_error = "no reason given"

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.last_error = message

    return Logger()


def _monitor(trt: Any, name: str, progress: OnProgress) -> Any:
    """Reports each phase of a build that has no phase above it."""

    class Monitor(trt.IProgressMonitor):
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                progress(f"{name}: {phase_name}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

        def phase_finish(self, phase_name: str) -> None:
            return None

    return Monitor()


def _builder_config(trt: Any, builder: Any, target: Target) -> Any:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if target.backend == "tensorrt-rtx":
        config.num_compute_capabilities = len(target.capabilities)
        for index, capability in enumerate(target.capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), index)
    return config


def _add_profile(builder: Any, network: Any, config: Any, sizes: ShapeProfile) -> None:
    """Give the builder the shapes of all inputs that have a dynamic dimension."""
    profile = builder.create_optimization_profile()
    for tensor in (network.get_input(index) for index in range(network.num_inputs)):
        shapes = [list(tensor.shape) for _ in range(3)]
        for axis in (axis for axis, size in enumerate(tensor.shape) if size < 0):
            for shape, size in zip(shapes, sizes[tensor.get_dimension_name(axis)], strict=True):
                shape[axis] = size
        if shapes[0] != list(tensor.shape):
            profile.set_shape(tensor.name, *shapes)
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"profile: expected shapes that the network can have, got {sizes}")


@contextlib.contextmanager
def timing_cache(trt: Any, config: Any, target: Target) -> Iterator[None]:
    """The builder's measurements, kept from build to build, one file per library version and GPU. TensorRT for RTX
    measures nothing at build."""
    if target.backend == "tensorrt-rtx":
        yield
        return
    path = cache_path(f"{target.backend}-{trt.__version__}-{target.capabilities[0]}.timing")
    config.set_timing_cache(config.create_timing_cache(path.read_bytes() if path.is_file() else b""), False)
    yield
    with contextlib.suppress(OSError):  # without a cache the next build is slower, not wrong
        keep(path, bytes(config.get_timing_cache().serialize()))

"""Loads and checks a plan of TensorRT or TensorRT for RTX, and runs it over bound memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import EngineError
from ..engine_file import REBUILD, Manifest, ProgramSpec

PLAN_DTYPES = {
    "INT64": "int64", "INT32": "int32", "BOOL": "bool", "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"
}  # fmt: skip

Shape = tuple[int, ...]


class Plan:
    """A deserialized plan. Raises EngineError for what is not the manifest's program.

    inputs: names of those that the plan reads; dynamic: of those whose shape is set for each run. digest: sha256 of
    its file.
    """

    def __init__(self, trt: Any, runtime: Any, directory: Path, manifest: Manifest, program: ProgramSpec):
        path, spec = directory / program.file, manifest.spec
        self.path, self.program, self.library = path, program, trt
        self.digest: str = manifest.files[program.file]["sha256"]
        self.engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self.engine is None:
            raise EngineError(
                f"{path}: expected a plan that {spec.config['backend']} {trt.__version__} loads, got one that it "
                f"refuses; {REBUILD} here"
            )
        names = [self.engine.get_tensor_name(index) for index in range(self.engine.num_io_tensors)]
        self.inputs = [name for name in names if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._check(names, manifest)
        self.dynamic = [name for name in self.inputs if -1 in tuple(self.engine.get_tensor_shape(name))]

    def _check(self, names: list[str], manifest: Manifest) -> None:
        outputs = set(names) - set(self.inputs)
        odd = (set(self.inputs) - set(self.program.inputs)) | (outputs ^ set(self.program.outputs))
        if odd:  # an input that nothing reads may be missing
            raise EngineError(
                f"{self.path}: expected the inputs and outputs of the manifest, got a difference in "
                f"{sorted(odd)[:3]!s:.300}; {REBUILD}"
            )
        for tensor in (*manifest.spec.state, *manifest.spec.shared, *manifest.spec.caches):
            if tensor.name in self.inputs:
                dtype = PLAN_DTYPES.get(self.engine.get_tensor_dtype(tensor.name).name)
                if dtype != tensor.dtype:
                    raise EngineError(f"{self.path}: {tensor.name}: expected {tensor.dtype}, got {dtype}; {REBUILD}")

    def profile(self, shapes: Mapping[str, Shape]) -> int:
        """Index of the first profile that allows these shapes of the dynamic inputs. Raises EngineError."""
        for index in range(self.engine.num_optimization_profiles):
            bounds = ((shapes[name], self.engine.get_tensor_profile_shape(name, index)) for name in self.dynamic)
            if all(
                low <= size <= high
                for shape, (least, _, most) in bounds
                for low, size, high in zip(least, shape, most, strict=True)
            ):
                return index
        got = {name: shapes[name] for name in self.dynamic}
        raise EngineError(f"{self.path}: expected shapes that one of its profiles allows, got {got}; {REBUILD}")


class Execution:
    """An execution context of a plan. captures: its runs are CUDA graphs that the library makes by itself."""

    def __init__(
        self, plan: Plan, config: Any = None, after_first: Callable[[], None] | None = None, captures: bool = False
    ):
        """config: an IRuntimeConfig of the plan's engine, where the library has it; after_first: called after the first
        run."""
        self.plan, self.captures, self._profile, self._after_first = plan, captures, 0, after_first
        self.context = plan.engine.create_execution_context(*([config] if config is not None else []))
        if self.context is None:
            raise EngineError(
                f"{plan.path}: expected an execution context, TensorRT made none, most often for want of GPU memory; "
                f"free some, or {REBUILD} and a smaller --max-batch or --max-seq-len"
            )

    def bind(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int], stream: int) -> None:
        """Set the shapes of dynamic inputs, and the memory of every input and output, for runs to come."""
        if self.plan.dynamic:
            profile = self.plan.profile(shapes)
            if profile != self._profile:
                if not self.context.set_optimization_profile_async(profile, stream):
                    raise EngineError(f"{self.plan.path}: profile {profile}: expected to be set, was refused")
                self._profile = profile
        for name in self.plan.dynamic:
            if not self.context.set_input_shape(name, shapes[name]):
                raise EngineError(f"{self.plan.path}: {name}: expected to take shape {shapes[name]}, was refused")
        for name in (*self.plan.inputs, *self.plan.program.outputs):
            if not self.context.set_tensor_address(name, addresses[name]):
                raise EngineError(f"{self.plan.path}: {name}: expected to be bound, was refused; {REBUILD}")

    def run(self, stream: int) -> None:
        """Run over what is bound."""
        if not self.context.execute_async_v3(stream):
            raise EngineError(f"{self.plan.path}: expected to run, TensorRT refused; its log says why")
        if self._after_first is not None:
            self._after_first()
            self._after_first = None

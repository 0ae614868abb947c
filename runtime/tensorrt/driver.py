"""The few calls of the CUDA driver that plugins and the TensorRT runtime need, without a CUDA package or torch."""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # of CUdevice_attribute
CAPTURE_THIS_THREAD = 1  # of CUstreamCaptureMode: what other threads do meanwhile is not our concern


class DriverError(RuntimeError):
    """A driver call that failed, or no driver: says which and why."""


class Driver:
    """Device 0 of a CUDA driver library, its primary context current in each thread that calls. Raises DriverError."""

    def __init__(self, library: str = "libcuda.so.1"):
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise DriverError(f"CUDA: expected an NVIDIA driver, got {error}") from None
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._entered = threading.local()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises DriverError with the driver's own words."""
        if self._context and not hasattr(self._entered, "context"):  # this thread's first call
            self._entered.context = self._context
            self.call("cuCtxSetCurrent", self._context)
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise DriverError(f"{name}: expected success, got error {status}: {(text.value or b'unknown').decode()}")

    def capability(self) -> int:
        """The device's compute capability, e.g. 89 for 8.9."""
        values = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            values.append(value.value)
        return 10 * values[0] + values[1]

    def allocate(self, size: int) -> int:
        """Address of `size` new bytes, zero; they live until `free`."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self.call("cuCtxSynchronize")  # our streams do not wait for the default stream
        return address.value

    def zero(self, address: int, size: int, stream: int) -> None:
        """Fill device memory with zeros, in the stream's order."""
        self.call(
            "cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), _pointer(stream)
        )

    def free(self, address: int) -> None:
        """Give memory of `allocate` back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def stream(self) -> int:
        """A new stream that does not wait for the default stream; it lives until `free_stream`."""
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value or 0

    def free_stream(self, stream: int) -> None:
        """Give a stream back, when its work is done."""
        self.call("cuStreamDestroy_v2", _pointer(stream))

    def upload(self, address: int, data: Any, stream: int) -> None:
        """Copy a contiguous host buffer to the device, in the stream's order; the buffer may be reused at once."""
        view = memoryview(data).cast("B")
        host = (ctypes.c_ubyte * len(view)).from_buffer_copy(view)
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), host, ctypes.c_size_t(len(view)), _pointer(stream))

    def download(self, data: Any, address: int, stream: int) -> None:
        """Fill a writable contiguous host buffer from the device, when the stream's work so far is done."""
        view = memoryview(data).cast("B")
        host = (ctypes.c_ubyte * len(view)).from_buffer(view)
        self.call("cuMemcpyDtoHAsync_v2", host, ctypes.c_uint64(address), ctypes.c_size_t(len(view)), _pointer(stream))
        self.call("cuStreamSynchronize", _pointer(stream))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy device memory, in the stream's order."""
        self.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            _pointer(stream),
        )

    def capture(self, run: Callable[[], None], stream: int) -> int:
        """Record what `run` does on the stream, which runs nothing -> a graph for `launch_graph`. Raises what `run`
        raises, and DriverError for work that cannot be captured; the stream is as it was."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", _pointer(stream), CAPTURE_THIS_THREAD)
        try:
            run()
        except BaseException:
            with contextlib.suppress(DriverError):  # of the two errors, that of `run` says why
                self.call("cuStreamEndCapture", _pointer(stream), ctypes.byref(graph))
                self.call("cuGraphDestroy", graph)
            raise
        self.call("cuStreamEndCapture", _pointer(stream), ctypes.byref(graph))
        try:
            self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        finally:
            self.call("cuGraphDestroy", graph)
        return executable.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        """Run what `capture` recorded."""
        self.call("cuGraphLaunch", _pointer(graph), _pointer(stream))

    def free_graph(self, graph: int) -> None:
        """Give a graph of `capture` back."""
        self.call("cuGraphExecDestroy", _pointer(graph))

    @functools.cache  # noqa: B019 (one driver per process; modules live as long as it does)
    def function(self, ptx: str, entry: str) -> int:
        """A kernel from its PTX, loaded once."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ptx.encode() + b"\0")
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        return function.value or 0

    def launch(
        self,
        function: int,
        grid: Sequence[int],
        threads: int,
        shared: int,
        stream: int,
        arguments: Sequence[Any],
    ) -> None:
        """Launch a kernel; `arguments` are its parameters as ctypes values."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        block = (threads, 1, 1)
        self.call("cuLaunchKernel", _pointer(function), *grid, *block, shared, _pointer(stream), pointers, None)


@functools.cache
def driver() -> Driver:
    """The process's driver. Raises DriverError."""
    return Driver()


def _pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)

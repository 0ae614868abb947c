"""Has the C++ compiler make the parts of a program at the same time: its wrapper, and its kernels in two halves."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch._inductor import codecache
from torch._inductor.cpp_builder import CppBuilder

from .interface_once import interface_object

KERNEL = "#include <torch/csrc/inductor/cpp_prefix.h>\n"  # with which each kernel begins
LONG = 150_000  # characters of kernels that are worth a second run of the compiler: 2 seconds of it


@contextlib.contextmanager
def compiled_in_parts(kernels: str, linked: bool) -> Iterator[str]:
    """Within it, a program is compiled in parts -> the kernels that are left to PyTorch. linked: the program's code was
    made `without_interface`, and is linked to it."""
    first, second = halves(kernels)
    with ThreadPoolExecutor() as pool, patch.object(codecache, "CppBuilder", _Parts(pool, second, linked).builder):
        yield first


def halves(kernels: str) -> tuple[str, str]:
    """Kernels in two parts of about the same length; the second is empty where that is not worth it."""
    if len(kernels) < LONG:
        return kernels, ""
    made, *parts = kernels.split(KERNEL)
    while parts and len(made) + len(parts[0]) / 2 < len(kernels) / 2:
        made += KERNEL + parts.pop(0)
    return made, "".join(KERNEL + part for part in parts)


class _Parts:
    """The parts of one program. PyTorch asks for a builder of each, has them build, and links them."""

    def __init__(self, pool: Executor, more_kernels: str, linked: bool):
        self.pool, self.more_kernels, self.linked = pool, more_kernels, linked
        self.begun: list[Future[None]] = []
        self.objects: list[str] = []  # to be linked besides PyTorch's
        self.made: list[Path] = []  # files to be removed then
        self.of_wrapper: Any = None  # the options of the wrapper's compiler

    def builder(self, name: str, sources: str | list[str], BuildOption: Any, output_dir: str = "") -> CppBuilder:
        """In the place of PyTorch's `CppBuilder`, whose arguments have these names."""
        if isinstance(sources, list):
            return self._linker(name, sources, BuildOption, output_dir)
        builder = CppBuilder(name, sources, BuildOption, output_dir)
        if sources.endswith(".wrapper.cpp"):
            self.of_wrapper = BuildOption
            return self._begins(builder)
        if sources.endswith(".kernel.cpp"):
            if self.more_kernels:
                self._add(f"{name}.more", BuildOption, output_dir)
            return self._begins(builder)
        return builder

    def _begins(self, builder: Any) -> CppBuilder:
        """The same builder, which only begins to build."""
        build = builder.build
        builder.build = lambda: self._begin(build)
        return builder

    def _begin(self, build: Callable[[], None]) -> None:
        """PyTorch's settings are variables of a context, which another thread has not by itself."""
        self.begun.append(self.pool.submit(contextvars.copy_context().run, build))

    def _add(self, name: str, options: Any, folder: str) -> None:
        file = Path(folder) / f"{name}.cpp"
        file.write_text(self.more_kernels)
        builder = CppBuilder(name, str(file), options, folder)
        self.objects.append(builder.get_target_file_path())
        self.made += [file, Path(builder.get_target_file_path())]
        self._begin(builder.build)

    def _linker(self, name: str, sources: list[str], options: Any, folder: str) -> CppBuilder:
        """What links all objects of a program, once they are there. Raises what a part's compiler raised."""
        if self.linked:
            file = Path(folder) / f"{name}.interface.o"
            file.write_bytes(interface_object(self.of_wrapper))
            self.objects.append(str(file))
            self.made.append(file)
        for part in self.begun:
            part.result()
        builder: Any = CppBuilder(name, [*sources, *self.objects], options, folder)
        link = builder.build

        def link_and_remove() -> None:
            link()
            for file in self.made:
                file.unlink()

        builder.build = link_and_remove
        linker: CppBuilder = builder
        return linker

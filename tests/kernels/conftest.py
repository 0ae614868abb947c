"""One parametrised test, several backends: the reference, our C++, the ONNX function in ONNX Runtime, Triton under its
interpreter, Triton on a GPU."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor


def _interpret_triton() -> None:
    """Have Triton run its kernels on CPU tensors. It decides that when it is imported: unload it if it already was."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        if not name.startswith("triton._C"):  # a C++ module cannot be loaded twice, and knows nothing of this
            del sys.modules[name]


if not torch.cuda.is_available():
    _interpret_triton()


@pytest.hookimpl(tryfirst=True)  # before marks choose what runs
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter takes seconds for what a CPU does in milliseconds: of each test its first and its last case
    run by default, the others with the slow tests."""
    cases: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("backend") == "interpreter":
            cases.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    for found in cases.values():
        for item in found[1:-1]:
            item.add_marker(pytest.mark.slow)


@contextmanager
def _garbage_in_new_tensors() -> Iterator[None]:
    """torch.empty yields NaN and the largest integers: a kernel that leaves an entry unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Backend:
    name: str
    device: str

    def op(self, kernel: str) -> Callable[..., Any]:
        """This backend's implementation of a kernel, for tensors on `device`."""
        if self.name == "onnx":
            return getattr(importlib.import_module("onnx_kernels"), kernel)
        file = self.name if self.name in ("reference", "op") else "triton"
        module = importlib.import_module(f"specstep.kernels.{kernel}.{file}")
        function = getattr(module, kernel)

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(_garbage_in_new_tensors())
                if self.name == "interpreter":  # wrap_triton of torch < 2.13 refuses interpreted kernels
                    stack.enter_context(mock.patch.object(module, "wrap_triton", lambda kernel: kernel))
                return function(*args, **kwargs)

        return run


@pytest.fixture(
    scope="session", params=["reference", "op", "onnx", "interpreter", pytest.param("gpu", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest) -> Backend:
    has_gpu = torch.cuda.is_available()
    if request.param == "gpu" and not has_gpu:
        pytest.skip("needs an NVIDIA GPU")
    if request.param == "interpreter" and has_gpu:
        pytest.skip("the kernels run on the GPU here; one process cannot do both")
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
    elif request.param not in ("reference", "op"):
        pytest.importorskip("triton")
    return Backend(request.param, "cuda" if request.param == "gpu" else "cpu")


@pytest.fixture(scope="session", params=["reference", "op", "onnx"])
def host(request: pytest.FixtureRequest) -> Backend:
    """What runs on a CPU, of kernels whose Triton code has tests of its own: `op` is our C++."""
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
    return Backend(request.param, "cpu")


def _random_trees(batch: int, nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Parents [B, T] and valid [B, T]. Row b is of kind b % 5: empty, chain, random, random and pruned, garbage."""
    generator = torch.Generator().manual_seed(seed)
    node = torch.arange(nodes)
    parents = (torch.rand(batch, nodes, generator=generator) * node).long()
    valid = torch.ones(batch, nodes, dtype=torch.bool)
    for row in range(batch):
        kind = row % 5
        if kind == 0:
            valid[row] = False
        elif kind == 1:
            parents[row] = node - 1
        elif kind >= 3:
            valid[row] = torch.rand(nodes, generator=generator) < 0.8
        if kind == 4:
            garbage = torch.tensor([-1, -7, nodes, nodes + 40, 2**40, -(2**40), 2**62])
            drawn = garbage[torch.randint(len(garbage), (nodes,), generator=generator)]
            drawn = torch.where(torch.rand(nodes, generator=generator) < 0.2, node, drawn)  # its own parent
            parents[row] = torch.where(torch.rand(nodes, generator=generator) < 0.3, drawn, parents[row])
    parents[:, 0] = -1
    return parents, valid


@pytest.fixture(scope="session")
def random_trees() -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    return _random_trees


def _chains(parents: list[int], valid: list[bool]) -> list[list[int]]:
    """For each node its path from the root, itself last; just itself for a node that is not in the tree."""
    chains: list[list[int]] = [[0]]
    for node in range(1, len(parents)):
        parent = parents[node]
        linked = valid[node] and 0 <= parent < node and chains[parent][0] == 0
        chains.append([*chains[parent], node] if linked else [node])
    return chains


@pytest.fixture(scope="session")
def chains() -> Callable[[list[int], list[bool]], list[list[int]]]:
    return _chains

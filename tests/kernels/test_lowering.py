"""The ops in a graph: one node each when exported, their bodies in the compiled code, caches written in place."""

from pathlib import Path
from typing import Any

import pytest
import torch
from specstep.kernels.accept.op import accept
from specstep.kernels.compact.op import compact
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

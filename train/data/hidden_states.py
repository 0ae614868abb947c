"""The target's hidden states over finished sequences, from transformers' own forward pass."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...compile.source import Source

TOKENS = 4096  # of a batch, padding included


def fast_bfloat16(device: str) -> bool:
    """Whether the processor multiplies matrices in bfloat16 itself."""
    return device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def quick_dtype(device: str) -> str:
    """Of a target's own passes: float32 is several times as fast without such products (bench/LOG.md)."""
    return "bfloat16" if fast_bfloat16(device) else "float32"


def feature_layers(layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head of EAGLE-3 reads, of a target with so many."""
    return tuple(max(layer, 0) for layer in (2, layers // 2, layers - 3))


@torch.no_grad()
def hidden_states(
    source: Source, sequences: Sequence[Sequence[int]], layers: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each sequence, in batches of about the same length: its index, the inputs of the named layers side by side
    [T, L*H] and the final hidden state, normed [T, H], bfloat16 on the CPU."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    while order:
        longest = len(sequences[order[-1]])
        batch = [order.pop() for _ in range(min(len(order), max(1, TOKENS // longest)))]
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)  # padded on the right, which no token looks at
        for row, index in enumerate(batch):
            ids[row, : len(sequences[index])] = torch.tensor(sequences[index])
        out = source.model.base_model(input_ids=ids.to(source.model.device), use_cache=False, output_hidden_states=True)
        states = [*out.hidden_states, out.last_hidden_state]
        hidden = torch.cat([states[layer] for layer in layers], -1).to("cpu", torch.bfloat16)
        last = out.last_hidden_state.to("cpu", torch.bfloat16)
        for row, index in enumerate(batch):
            length = len(sequences[index])
            yield index, hidden[row, :length].clone(), last[row, :length].clone()

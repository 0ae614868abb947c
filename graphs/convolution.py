"""Short causal convolutions of hybrid models, each over the path of its token: the sequence and, in a tree, the token's
own ancestors.

A row keeps the last inputs of each layer's convolution; what a pass adds is committed with its tokens. A token's output
is the same to the bit in a chain, a tree and any chunk of a prompt: it is summed in one order, the oldest input first.
Letters: B batch, T tokens in this pass, C channels, K inputs of an output.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..kernels.shift.op import shift
from .hybrid_cache import ConvolutionInputs

NAME = "causal_conv1d_fn"  # what transformers' modeling code calls


def convolve(inputs: ConvolutionInputs, weight: Tensor, bias: Tensor | None) -> Tensor:
    """weight [C, K], the last column that of the token itself; bias [C] -> float32 [B, T, C]. What the tokens leave
    is committed with them."""
    out = torch.zeros((), device=weight.device)
    for tap, x in enumerate(taps(inputs, weight.shape[1])):
        out = out + x.float() * weight[:, tap].float()
    commit_inputs(inputs)
    return out if bias is None else out + bias.float()


def taps(inputs: ConvolutionInputs, size: int) -> list[Tensor]:
    """The `size` inputs that end with each token's own on its path, the oldest first: [B, T, C] each. Ahead of a
    sequence are zeros."""
    kept, channels = inputs.window.shape[1], inputs.own.shape[2]
    inputs_by_age = torch.cat([inputs.window, inputs.own], 1)
    return [
        inputs_by_age.gather(1, (token + kept)[:, :, None].expand(-1, -1, channels))
        for token in inputs.where.window(size).unbind(2)
    ]


def commit_inputs(inputs: ConvolutionInputs) -> None:
    """Have the last inputs kept of what the tokens of the pass leave, once it is known which of them are committed."""
    inputs.where.on_commit(shift, inputs.window, inputs.own)


def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function over cached inputs, and the original one, in plain torch, for all else."""
    original = inspect.unwrap(original)  # without a search for faster kernels, which says that there are none

    def causal_conv1d(
        hidden_states: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **rest: Any,
    ) -> Any:
        """-> [B, C, T]"""
        if not isinstance(hidden_states, ConvolutionInputs):
            # torch compares the dtypes of x and bias ahead of what `RaisedTo` sees; a copy comes through that.
            bias = None if bias is None else bias.clone()
            return original(hidden_states, weight, bias, activation, **rest)
        out = convolve(hidden_states, weight, bias)
        out = out if activation is None else ACT2FN[activation](out)
        return out.to(hidden_states.own.dtype).transpose(1, 2)

    return causal_conv1d


def has_convolutions(model: PreTrainedModel) -> bool:
    """Whether the model's code has short convolutions that can be replaced."""
    return hasattr(sys.modules[type(model).__module__], NAME)


def convolution_sizes(model: PreTrainedModel) -> list[int]:
    """How many inputs the outputs of the model's convolutions have."""
    return sorted({int(module.kernel_size[0]) for module in model.modules() if isinstance(module, nn.Conv1d)})


def register_convolutions(model: PreTrainedModel) -> None:
    """Have the model's code call ours for cached inputs; for all else it stays as it is."""
    module = sys.modules[type(model).__module__]
    function = getattr(module, NAME, None)
    if function is not None and function.__name__ != "causal_conv1d":
        setattr(module, NAME, replaced(function))

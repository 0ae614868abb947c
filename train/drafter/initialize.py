"""A drafter's start, so that training begins with one that already works.

`fc` starts as the linear map that best turns the target's features at t into its final hidden state at t + 1; layers
start as adding nothing; the output rows are the target's own. What an EAGLE head drafts at its first level is then the
best linear draft, and all that training has to learn is what it lacks.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ...errors import InputError
from .kind import Wanted
from .unroll import TrainingBatch

SCALES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
RIDGE = 1e-3  # of the features' mean square: keeps the solution small where features say nothing
# What a layer or a correction adds goes through one of these.
ADDED = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias", "markov_w2.weight")


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """counts [V_target], how often the target wrote each token -> the `size` most frequent, ascending; among equals the
    lower id first."""
    return counts.argsort(descending=True, stable=True)[: min(size, len(counts))].sort().values


def mask_token(counts: Tensor, embeddings: Tensor) -> int:
    """The token that may stand for one that is not known yet. counts [V]: how often the target wrote each; embeddings
    [V, H]. Of those that it wrote least, that one whose embedding is as long as most are: models leave some at 0."""
    length = torch.linalg.vector_norm(embeddings.detach(), dim=-1, dtype=torch.float32).cpu()
    odd = (length - length.median()).abs()
    return int(odd.masked_fill(counts > counts.min(), float("inf")).argmin())


def layer_like(wanted: Wanted) -> LlamaConfig:
    """The config of a Llama layer of the target's own sizes, but for the MLP where the options say another."""
    text, given = wanted.target.model.config.get_text_config(), wanted.options.intermediate_size
    heads = text.num_attention_heads
    return LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=given or getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=1e-5,
        rope_theta=rope_theta(text),
        max_position_embeddings=text.max_position_embeddings,
    )


def rope_theta(text: object) -> float:
    """The base of the target's rotary positions, where it has one; else Llama's."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)


@torch.no_grad()
def adding_nothing(drafter: Any, wanted: Wanted) -> Any:
    """A new drafter, made so that its layers add nothing yet and its output rows are the target's, on its device."""
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.02)
        if name.endswith(ADDED):
            parameter.zero_()
    model, vocabulary = wanted.target.model, wanted.vocabulary
    drafter.lm_head.weight.copy_(model.get_output_embeddings().weight[vocabulary.to(model.device)])
    drafter.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    return drafter.to(model.device)


@torch.no_grad()
def fit_features(drafter: Any, batches: Iterable[TrainingBatch], fresh: bool) -> None:
    """Set `fc` of a fresh drafter by ridge regression over some batches, and the output norm to the size of the
    target's hidden states."""
    if not fresh:
        return
    width, size = drafter.fc.in_features, drafter.fc.out_features
    device = drafter.fc.weight.device
    square, product = torch.zeros(width, width, device=device), torch.zeros(width, size, device=device)
    power, rows = torch.zeros((), device=device), 0
    for batch in batches:
        wanted = batch.labels[:, 1:] & (batch.sequence[:, 1:] == batch.sequence[:, :-1])
        features, last = batch.features[:, :-1][wanted].float(), batch.last[:, 1:][wanted].float()
        square += features.T @ features
        product += features.T @ last
        power += last.square().sum()
        rows += len(last)
    if not rows:
        raise InputError("data: expected tokens that the target wrote and that the draft vocabulary has, got none")
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    drafter.fc.weight.copy_(torch.linalg.solve(square, product).T)
    drafter.norm.weight.fill_((power / (rows * size)).sqrt())


@torch.no_grad()
def fit_scale(norm: nn.Module, loss: Callable[[], float]) -> None:
    """Scale the output norm of a new drafter, so that its probabilities are as sure as they are right: guesses of the
    size of the target's own hidden states would be far too sure. loss: of the first level, as the norm is now."""
    weight: Any = norm.weight
    size, losses = weight.clone(), {}
    for share in SCALES:
        weight.copy_(share * size)
        losses[share] = loss()
    weight.copy_(min(losses, key=losses.__getitem__) * size)

"""A head's start, so that training begins with a drafter that already works.

`fc` starts as the linear map that best turns the target's features at t into its final hidden state at t + 1; the
layer starts as adding nothing; the output rows are the target's own. Drafts of the first level are then the best
linear ones, and all that training has to learn is what they lack.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ...compile.source import Source
from ...errors import InputError
from ...graphs.drafters.eagle3 import Eagle3Config, Eagle3Head
from .unroll import TrainingBatch

SCALES = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
RIDGE = 1e-3  # of the features' mean square: keeps the solution small where features say nothing


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """counts [V_target], how often the target wrote each token -> the `size` most frequent, ascending; among equals the
    lower id first."""
    return counts.argsort(descending=True, stable=True)[: min(size, len(counts))].sort().values


def new_head(target: Source, layers: tuple[int, ...], vocabulary: Tensor, intermediate_size: int | None) -> Eagle3Head:
    """A head in the target's own sizes, its layer adding nothing yet, for the draft vocabulary [V] of target ids."""
    text = target.model.config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    layer = LlamaConfig(
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=rope_theta(text),
        max_position_embeddings=text.max_position_embeddings,
    )
    head = Eagle3Head(Eagle3Config(layer, len(vocabulary), text.hidden_size, layers))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        head.lm_head.weight.copy_(target.model.get_output_embeddings().weight[vocabulary.to(target.model.device)])
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    return head.to(target.model.device)


def rope_theta(text: object) -> float:
    """The base of the target's rotary positions, where it has one; else Llama's."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0)


@torch.no_grad()
def fit_features(head: Eagle3Head, batches: Iterable[TrainingBatch]) -> None:
    """Set `fc` by ridge regression over some batches, and the output norm to the size of the target's hidden states."""
    width, size = head.fc.in_features, head.fc.out_features
    device = head.fc.weight.device
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
    head.fc.weight.copy_(torch.linalg.solve(square, product).T)
    _fit_scale(head, features, last, (power / (rows * size)).sqrt())


def _fit_scale(head: Eagle3Head, features: Tensor, last: Tensor, size: Tensor) -> None:
    """Set the output norm, so that the drafts' probabilities are as sure as they are right: guesses of the size of the
    target's own hidden states would be far too sure. features [M, F] and last [M, H] of the last batch."""
    wanted = head.lm_head(last).softmax(-1)
    hidden, losses = head.fc(features), {}
    for share in SCALES:
        head.norm.weight.fill_(share * size)
        losses[share] = float(nn.functional.cross_entropy(head.lm_head(head.norm(hidden)), wanted))
    head.norm.weight.fill_(min(losses, key=losses.__getitem__) * size)

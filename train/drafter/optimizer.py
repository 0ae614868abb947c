"""How a drafter's parameters move: Muon for the matrices of its layers, AdamW for rows of tokens and for vectors."""

import math
from typing import Any

import torch
from torch import nn

WARM_UP = 0.03  # share of the steps
LAST = 0.02  # of the learning rate, at the end
CLIP = 1.0  # norm of the gradient
OUTPUT_RATE = 0.1  # of the learning rate, for rows of tokens and vectors
ROWS = ("lm_head", "markov_w")  # parameters with a row for each token


class Optimizer:
    """One learning rate for all: warmed up, then a cosine down to almost nothing."""

    def __init__(self, module: nn.Module, learning_rate: float, steps: int):
        named = dict(module.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and not any(part in name for part in ROWS)]
        rest = [p for name, p in named.items() if p.ndim != 2 or any(part in name for part in ROWS)]
        self.parameters, self.steps = list(named.values()), steps
        muon = torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(rest, lr=OUTPUT_RATE * learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
        self._parts = ((muon, learning_rate), (adam, OUTPUT_RATE * learning_rate))

    def step(self, step: int) -> None:
        """One update from the gradients, which are cleared; step counts from 0."""
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * self.schedule(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def schedule(self, step: int) -> float:
        """The share of the learning rate at a step."""
        done = step / max(self.steps, 1)
        warm = min(1.0, (step + 1) / max(1.0, WARM_UP * self.steps))
        return warm * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)

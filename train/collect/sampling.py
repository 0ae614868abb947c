"""Sample from a model as transformers runs it, a batch at a time.

A plain loop over the model and transformers' own cache: it needs no engine, and takes as many rows as memory holds.
Letters: B rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from ...compile.source import Source
from ...graphs.kept import cache_layers, cache_name

LIKELIEST = 256  # tokens among which one is drawn: sorting the whole vocabulary would take longer than the model
SHARE_OF_MEMORY = 4  # a cache may take one part in so many of what is free


@torch.no_grad()
def sample(
    source: Source,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    temperatures: Sequence[float],
    top_p: float = 0.95,
    stop_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
    tick: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """Continue prompts of any lengths, together -> the new tokens of each, a final stop token included.

    limits, temperatures: most new tokens of each row, and its temperature, above 0. generator: of the model's device.
    `tick` is called with the tokens of each pass.
    """
    model, device, name = source.model, source.model.device, cache_name(source.model)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)  # [B, T]
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    temperature = torch.tensor(temperatures, device=device)[:, None]
    results: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # the prompt of each row of the batch
    while rows:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, name: cache}
        logits = model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = draw(logits.float() / temperature, top_p, generator)  # [B]
        running = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            results[row].append(token)
            if token not in stop_ids and len(results[row]) < limits[row]:
                running.append(place)
        tick(len(rows))
        if len(running) < len(rows):  # the rows that ended leave the batch
            kept = torch.tensor(running, device=device, dtype=torch.int64)
            cache.batch_select_indices(kept)
            mask, positions, chosen, temperature = mask[kept], positions[kept], chosen[kept], temperature[kept]
            rows = [rows[place] for place in running]
        ids, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return results


def draw(logits: Tensor, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Logits [B, V] float32 -> a token of each row [B], drawn among the likeliest whose probabilities reach `top_p`."""
    scores, tokens = logits.topk(min(LIKELIEST, logits.shape[1]), dim=-1)
    probability = (scores - logits.logsumexp(-1, keepdim=True)).exp()
    before = probability.cumsum(-1) - probability
    probability = probability.where(before < top_p, 0)  # the likeliest always stays
    return tokens.gather(1, torch.multinomial(probability, 1, generator=generator))[:, 0]


def rows_that_fit(source: Source, length: int, most: int) -> int:
    """How many rows of `length` tokens a cache can hold in the memory that is free, from 1 to `most`."""
    size = source.model.dtype.itemsize
    per_token = sum(layer.heads * (layer.key_size + layer.value_size) * size for layer in cache_layers(source.model))
    return max(1, min(most, free_memory(source.model.device) // SHARE_OF_MEMORY // (per_token * length)))


def free_memory(device: torch.device) -> int:
    """Bytes that can be had without pushing anything out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024

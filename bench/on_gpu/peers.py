"""Plain greedy decoding by others, of the same model in the same process: milliseconds for a token of each row."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from specstep.progress import OnProgress
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StaticCache

from .clock import Deadline, wait

NEW_TOKENS, WARM = 40, 8  # of a run, and those of them that are not timed: the first ones compile and capture
CHUNK = 512  # prompt tokens of a prefill


def generate(model: PreTrainedModel, batch: int, tokens: int) -> float:
    """transformers' generate as it comes: eager, with a cache that grows."""
    return _generate_ms(model, batch, tokens)


def generate_compiled(model: PreTrainedModel, batch: int, tokens: int) -> float:
    """transformers' generate with a static cache, for which it compiles the model's pass on a GPU."""
    return _generate_ms(model, batch, tokens, cache_implementation="static")


@torch.no_grad()
def compiled_loop(model: PreTrainedModel, batch: int, tokens: int) -> float:
    """A loop over one compiled pass and its argmax, without generate: `torch.compile`, with CUDA graphs on a GPU."""
    cache = StaticCache(config=model.config, max_cache_len=tokens + NEW_TOKENS + WARM)
    prompt = _prompt(model, batch, tokens)
    for start in range(0, tokens, CHUNK):
        out = model(prompt[:, start : start + CHUNK], past_key_values=cache, use_cache=True, logits_to_keep=1)

    def forward(token: Tensor) -> Tensor:
        return model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    decode = torch.compile(forward, fullgraph=True, mode="reduce-overhead")
    token = out.logits[:, -1:].argmax(-1)
    begin = 0.0
    for done in range(NEW_TOKENS):
        if done == WARM:
            wait(model.device.type)
            begin = time.perf_counter()
        token = decode(token).clone()
    wait(model.device.type)
    return (time.perf_counter() - begin) / (NEW_TOKENS - WARM) * 1e3


PEERS: dict[str, Callable[[PreTrainedModel, int, int], float]] = {
    "generate": generate,
    "generate, compiled": generate_compiled,
    "torch.compile": compiled_loop,
}
COMPILED = ("generate, compiled", "torch.compile")


def measure_peers(
    model: PreTrainedModel, batches: list[int], lengths: list[int], deadline: Deadline, progress: OnProgress
) -> Iterator[dict[str, Any]]:
    """A dict for each peer, number of rows and of tokens in their caches. One that fails says so in `error`."""
    for tokens in lengths:
        for batch in batches:
            for name, run in PEERS.items():
                if deadline.passed():
                    return
                progress(f"{name}, {batch} rows of {tokens} tokens")
                cell = {"peer": name, "batch": batch, "cache": tokens}
                try:
                    yield cell | {"token_ms": run(model, batch, tokens)}
                except Exception as error:  # of another's code: the rest is measured all the same
                    yield cell | {"error": one_line(error)}
                torch._dynamo.reset()  # a graph and a cache of each size would stay


def one_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


class Clock(LogitsProcessor):
    """Notes when each token's logits are there, without waiting for them."""

    def __init__(self, device: str):
        self.device, self.marks = device, list[Any]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.device == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())
        return scores

    def token_ms(self) -> float:
        """The mean from the last warm-up token on."""
        first, last, count = self.marks[WARM], self.marks[-1], len(self.marks) - 1 - WARM
        wait(self.device)
        passed: float = first.elapsed_time(last) if self.device == "cuda" else (last - first) * 1e3
        return passed / count


def _generate_ms(model: PreTrainedModel, batch: int, tokens: int, **options: Any) -> float:
    prompt = _prompt(model, batch, tokens)
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 1}
    for _ in range(2 if options else 1):  # the first one compiles
        clock = Clock(model.device.type)
        timed = LogitsProcessorList([clock])
        model.generate(prompt, max_new_tokens=NEW_TOKENS, logits_processor=timed, **given, **options)
    return clock.token_ms()


def _prompt(model: PreTrainedModel, batch: int, tokens: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(2, model.config.vocab_size, (batch, tokens), device=model.device)

"""An engine of a real model on a GPU: whether its answers are the model's, and how fast they come beside transformers.

python bench/gpu_text.py ENGINE [--model smollm2-135m] [--questions 12] [--max-new-tokens 128] [--nodes 0 all auto]
                         [--out bench/results/gpu_text.json]

Greedy answers to the questions of `make bench`. transformers scores each answer in float32 on the same GPU: a token
whose logit is far below the greatest one there was not chosen by the model. `--device cpu` takes an engine for a CPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specstep
import torch
from on_gpu.clock import machine, wait
from script import write_json
from side_by_side.questions import OWN, Question, read_questions
from specstep.compile.source import load_source
from specstep.runtime.engine_file import read_manifest
from torch import Tensor
from transformers import PreTrainedModel

OUT = Path(__file__).parent / "results" / "gpu_text.json"
WARM = 3  # answers that are not timed
NEAR = 0.5  # the most that rounding in bfloat16 may cost a chosen token's logit


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="what the engine was built from")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--nodes", nargs="+", default=["0", "all", "auto"], help="as of `specstep.load`")
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="answers at once")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 where a token is too far behind."""
    options = parse(arguments)
    spec = read_manifest(options.engine).spec
    source = load_source(options.model, spec.config["dtype"], "cpu")
    room = spec.max_seq_len - options.max_new_tokens
    questions = read_questions(OWN, source.tokenizer, options.questions, room, print)
    result: dict[str, Any] = machine(options.device) | {"engines": {}, "answers": len(questions)}
    said: dict[str, list[list[int]]] = {}
    for nodes in options.nodes:
        for rows in options.rows:
            name = f"{nodes} nodes, {rows} rows"
            result["engines"][name], said[name] = measure(
                options, int(nodes) if nodes.isdecimal() else nodes, rows, questions
            )
            write_json(options.out, result)
            print(name, result["engines"][name], flush=True)
    result["generate"] = {"token_ms": generate_ms(source.model.to(options.device), questions, options.max_new_tokens)}
    print("transformers", result["generate"], flush=True)
    exact = source.model.float()
    for name, answers in said.items():
        result["engines"][name] |= judged(exact, questions, answers) | parted(said, name)
        print(name, {key: result["engines"][name][key] for key in ("behind", "own_choice", "parted")}, flush=True)
    write_json(options.out, result)
    return int(any(found["behind"] > NEAR for found in result["engines"].values()))


def measure(
    options: argparse.Namespace, nodes: int | str, rows: int, questions: Sequence[Question]
) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures of an engine with so many nodes and rows, and its answers."""
    prompts, count = [question.tokens for question in questions], options.max_new_tokens
    device = "cuda:0" if options.device == "cuda" else None
    with specstep.load(options.engine, nodes=nodes, learning=False, device=device) as engine:
        for _ in range(WARM):
            engine.generate(prompts[:rows], count)
        results, seconds = [], []
        for start in range(0, len(prompts), rows):
            begin = time.perf_counter()
            results += engine.generate(prompts[start : start + rows], count)
            seconds.append(time.perf_counter() - begin)
    tokens = [len(result.token_ids) for result in results]
    steps = [result.stats["steps"] for result in results]
    return {
        "tokens_per_s": round(sum(tokens) / sum(seconds), 1),
        "token_ms": round(1e3 * statistics.median(second / count for second, count in _each(seconds, tokens, rows)), 4),
        "tokens_per_step": round(sum(tokens) / sum(steps), 3),
    }, [result.token_ids for result in results]


def _each(seconds: Sequence[float], tokens: Sequence[int], rows: int) -> list[tuple[float, int]]:
    sums = [sum(tokens[start : start + rows]) for start in range(0, len(tokens), rows)]
    return list(zip(seconds, sums, strict=True))


def generate_ms(model: PreTrainedModel, questions: Sequence[Question], count: int) -> float:
    """Milliseconds a token of transformers' `generate` with its defaults, the prompt's time included. The first answer
    warms up."""
    times = []
    for question in [questions[0], *questions[:3]]:
        ids = torch.tensor([question.tokens], device=model.device)
        wait(model.device.type)
        begin = time.perf_counter()
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
        wait(model.device.type)
        times.append((time.perf_counter() - begin) / (whole.shape[1] - ids.shape[1]))
    return round(1e3 * statistics.median(times[1:]), 4)


@torch.no_grad()
def judged(model: PreTrainedModel, questions: Sequence[Question], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """behind: the most that a token's logit is below the greatest one of its place. own_choice: the share of tokens
    that have the greatest."""
    gaps: list[Tensor] = []
    for question, tokens in zip(questions, answers, strict=True):
        ids = torch.tensor([[*question.tokens, *tokens]], device=model.device)
        logits = model(ids).logits[0, len(question.tokens) - 1 : -1]
        gaps.append((logits.amax(-1) - logits.gather(1, ids[0, len(question.tokens) :, None])[:, 0]).cpu())
    behind = torch.cat(gaps)
    return {"behind": round(float(behind.max()), 4), "own_choice": round(float((behind == 0).float().mean()), 4)}


def parted(said: dict[str, list[list[int]]], name: str) -> dict[str, int]:
    """How many answers differ from those of the first number of nodes and rows."""
    first = next(iter(said.values()))
    return {"parted": sum(one != other for one, other in zip(first, said[name], strict=True))}


if __name__ == "__main__":
    sys.exit(main())

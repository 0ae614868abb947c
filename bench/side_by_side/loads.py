"""Servers under load: so many clients at once, each with one question after the other, streamed.

Ours is `specstep serve`, the other llama.cpp's own server, both with a row for each client of the largest load and
without a cache of prompts. The same token ids go in; answers are greedy and of one length for all.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import httpx2 as httpx
from specstep.progress import OnProgress

from .engines import Contender, Settings
from .peer_llama_cpp import Runner as LlamaServer
from .questions import Question
from .turns import SETTLE_S
from .worker import Worker, end_with_parent

CLIENTS = (1, 2, 4, 8, 16)
TAKE_PART = ("specstep bf16 default", "specstep auto default", "llama.cpp bf16", "llama.cpp q8_0", "llama.cpp q4_0")
ANSWERS = 2  # of each client in a repeat
PATIENCE = 600  # seconds that an answer may take


@dataclass(frozen=True)
class Load:
    """One server under one load. tokens_s: of all clients together, prompts included. first_s: seconds to the first
    text, gap_s: between two chunks of a stream; the median and the 99th percentile of each."""

    engine: str
    clients: int
    tokens_s: float
    first_s: tuple[float, float]
    gap_s: tuple[float, float]


@dataclass
class Streamed:
    """One answer as its client saw it: when text came, in seconds from the call, and how many tokens there were."""

    times: list[float]
    tokens: int


class Server(Protocol):
    """A server that answers at a port of this machine. body: what it wants in each call besides OpenAI's fields."""

    port: int
    body: dict[str, Any]

    def close(self) -> None:
        """End it."""


class OurServer:
    """`specstep serve` in a process of its own, which ends when this one does."""

    def __init__(self, path: Path):
        self.body: dict[str, Any] = {}
        program = "from specstep.cli import main; raise SystemExit(main())"
        arguments = ["serve", f"model={path}", "--port", "0", "--prefix-cache", "0", "--no-learning"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent
        )
        assert self._process.stderr is not None
        said = next((line for line in self._process.stderr if "serving" in line), "")
        self.port = int(said.rstrip().rpartition(":")[2])
        self._log = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._log.wait()


def start(contender: Contender, path: Path, settings: Settings) -> Server:
    """The server of an engine, ready; what it prints goes nowhere."""
    if contender.family == "specstep":
        return OurServer(path)
    return LlamaServer(contender, path, settings, subprocess.DEVNULL)


def measure_loads(
    ready: Sequence[tuple[Contender, Path]],
    settings: Settings,
    questions: Sequence[Question],
    new_tokens: int,
    repeats: int,
    progress: OnProgress,
) -> tuple[list[Load], dict[str, float]]:
    """Each load on each server, in turns, `repeats` times after a warm-up -> the loads, and tokens/s of `generate`, one
    prompt after the other, without a server."""
    found = []
    with ExitStack() as stack:
        servers = {contender.name: start(contender, path, settings) for contender, path in ready}
        for server in servers.values():
            stack.callback(server.close)
        alone = _generate(ready, settings, questions, new_tokens, repeats)
        for clients in CLIENTS:
            runs: dict[str, list[tuple[float, list[Streamed]]]] = {name: [] for name in servers}
            for repeat in range(-1, repeats):
                progress(f"{clients} clients, repeat {repeat + 1} of {repeats}")
                for name, server in servers.items():
                    time.sleep(SETTLE_S)
                    one = asyncio.run(_load(server, clients, questions, new_tokens))
                    if repeat >= 0:
                        runs[name].append(one)
            found += [_load_of(name, clients, taken) for name, taken in runs.items()]
    return found, alone


def _generate(
    ready: Sequence[tuple[Contender, Path]],
    settings: Settings,
    questions: Sequence[Question],
    new_tokens: int,
    repeats: int,
) -> dict[str, float]:
    """Median tokens/s of each of our engines on the questions of a single client."""
    speeds: dict[str, float] = {}
    for contender, path in ready:
        if contender.family != "specstep":
            continue
        worker, taken = Worker(contender, path, settings), []
        for _ in range(-1, repeats):
            begun = time.perf_counter()
            texts = [worker.answer_all([question.tokens], new_tokens)[0] for question in questions[:ANSWERS]]
            taken.append(sum(map(len, texts)) / (time.perf_counter() - begun))
        worker.close()
        speeds[contender.name] = median(taken[1:])
    return speeds


async def _load(
    server: Server, clients: int, questions: Sequence[Question], new_tokens: int
) -> tuple[float, list[Streamed]]:
    """All clients at once -> seconds until the last is done, and their answers."""
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)  # servers end idle ones as they like
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE, limits=limits) as client:
        begun = time.perf_counter()  # making a client takes as long as several steps

        async def one(number: int) -> list[Streamed]:
            asked = [questions[(number + turn * clients) % len(questions)] for turn in range(ANSWERS)]
            return [await _stream(client, server.body | {"prompt": one.tokens}, new_tokens) for one in asked]

        answers = await asyncio.gather(*(one(number) for number in range(clients)))
    return time.perf_counter() - begun, [answer for each in answers for answer in each]


async def _stream(client: httpx.AsyncClient, asked: dict[str, Any], new_tokens: int) -> Streamed:
    """One question, read to its end."""
    asked = asked | {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    told = Streamed([], 0)
    begun = time.perf_counter()
    async with client.stream(
        "POST", "/v1/completions", json=asked | {"stream_options": {"include_usage": True}}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if any(choice.get("text") for choice in chunk.get("choices", [])):
                told.times.append(time.perf_counter() - begun)
            told.tokens = (chunk.get("usage") or {}).get("completion_tokens", told.tokens)
    return told


def _load_of(name: str, clients: int, runs: list[tuple[float, list[Streamed]]]) -> Load:
    """What the repeats say together."""
    answers = [answer for _, each in runs for answer in each]
    speeds = [sum(answer.tokens for answer in each) / seconds for seconds, each in runs]
    gaps = [after - before for answer in answers for before, after in zip(answer.times, answer.times[1:], strict=False)]
    return Load(name, clients, median(speeds), _spread([answer.times[0] for answer in answers]), _spread(gaps))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return median(values), quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]


def loads_table(loads: Sequence[Load], alone: dict[str, float]) -> str:
    """As Markdown: an engine and a load a line, and what `generate` does without a server."""
    lines = [
        "| engine | clients | tokens/s | first text, ms (median, p99) | between chunks, ms (median, p99) |",
        "|---|---:|---:|---:|---:|",
    ]
    for load in loads:
        first, gap = (f"{1e3 * middle:.0f}, {1e3 * late:.0f}" for middle, late in (load.first_s, load.gap_s))
        lines.append(f"| {load.engine} | {load.clients} | {load.tokens_s:.0f} | {first} | {gap} |")
    without = ", ".join(f"{name} {speed:.0f}" for name, speed in alone.items())
    return "\n".join(lines) + f"\n\n`generate`, one prompt after the other, without a server, tokens/s: {without}.\n"

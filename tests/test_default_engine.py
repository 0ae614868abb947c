"""What ships, as it ships: `specstep build smollm2-135m` without options, the default drafter in bfloat16."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import specstep
import torch
from specstep.compile.locate import ALIASES
from specstep.compile.source import load_source
from specstep.runtime.engine_file import WEIGHTS, read_manifest

PACKAGE, _, HINT = ALIASES["smollm2-135m"]
pytestmark = [
    pytest.mark.slow,  # its build takes minutes; .ci/run has it
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"the default model is not installed: {HINT}"),
]

PROMPTS = ["Why is the sky blue?", "List three facts about light.", "Write a haiku about the sea."]
COMMAND = "from specstep.cli import run_command; run_command()"
NEAR = 1.0  # how far below float32's best logit a token of bfloat16's choice may be; logits here are 10 to 30

MEMORY = """
import json, re, sys
import specstep
from pathlib import Path

def anonymous():  # memory that is no file's, in bytes
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Anonymous: *(\\d+) kB", rollup, re.M)[1])

def mappings(name):  # [offset, size, resident, written to] of each mapping of a file
    found, ours = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, *rest = line.split()
        if "-" in word and not word.endswith(":"):
            ours = line.endswith(name)
            first, last = (int(end, 16) for end in word.split("-"))
            if ours:
                found.append({"offset": int(rest[1], 16), "size": last - first})
        elif ours and word in ("Rss:", "Anonymous:"):
            found[-1][word] = 1024 * int(rest[0])
    return found

first = specstep.load(sys.argv[1])  # what is allocated once, whatever is loaded
first.generate([1, 2, 3], 4)
before = anonymous()
engine = specstep.load(sys.argv[1])
engine.generate(list(range(5, 50)), 20, ignore_eos=True)
grown, mapped = anonymous() - before, mappings("weights.safetensors")
from safetensors.torch import load_file
copy = {name: tensor.clone() for name, tensor in load_file(sys.argv[1] + "/weights.safetensors").items()}
print(json.dumps({"grown": grown, "copied": anonymous() - before - grown, "mapped": mapped}))
"""


@pytest.fixture(scope="module")
def folder(once):
    def build(output):
        as_it_ships = {
            name: value for name, value in os.environ.items() if name != "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"
        }
        command = [sys.executable, "-c", COMMAND, "build", "smollm2-135m", "-o", output]
        subprocess.run(command, check=True, env=as_it_ships)

    return once("default", build)


@pytest.fixture(scope="module")
def engine(folder):
    with specstep.load(folder, deep_check=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def results(engine):
    """One prompt after the other: a batch of 1."""
    return [engine.generate(prompt, 48, chat=True) for prompt in PROMPTS]


def test_nothing_is_set_but_the_defaults(folder):
    config = read_manifest(folder).spec.config
    expected = {"dtype": "bfloat16", "backend": "inductor", "device": "cpu", "drafter": "default", "max_batch": 1}
    assert {name: config[name] for name in expected} == expected


def test_weights_are_the_blocks_of_the_models_file(folder):
    """q4_1 and, for the head, q8_0: five and eight and a half bits a weight. The drafter's own are int4."""
    kinds = read_manifest(folder).about["weights"]
    layers, head, hidden, vocabulary = 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536), 576 * 49152, 576, 49152
    drafting = 3 * 576 * 576 + 2 * 576 * 960 + 576 * 576 + 3 * 576 * 1536 + 576 * 4096  # its input is 3 hidden states
    assert kinds["int4_least"] == layers * 20 // 32 and vocabulary % 16 == hidden % 32 == 0
    assert kinds["int8"] == head * 34 // 32 and kinds.get("bfloat16", 0) < 100_000
    assert kinds["int4"] == drafting * 18 // 32


def test_answers_are_text(results):
    for result in results:
        assert result.finish_reason in ("stop", "length") and len(result.text.split()) > 5
        assert "\ufffd" not in result.text and "<|im_" not in result.text
        stats = result.stats
        assert stats["new_tokens"] == len(result.token_ids) and 0 < stats["steps"] <= stats["new_tokens"]
        assert stats["decode_s"] > 0 and stats["prefill_s"] > 0


def test_drafts_are_accepted(folder, results):
    """How many nodes pay, and whether the head does, depends on what else the machine does: here all are verified."""
    with specstep.load(folder, nodes="all", learning=False) as engine:
        for prompt, result in zip(PROMPTS, results, strict=True):
            drafted = engine.generate(prompt, 48, chat=True)
            assert drafted.token_ids == result.token_ids and drafted.stats["tokens_per_step"] > 1.5


def test_answers_are_the_same_again(engine, folder, results):
    assert [engine.generate(prompt, 48, chat=True).token_ids for prompt in PROMPTS] == [r.token_ids for r in results]
    streamed = "".join(engine.stream(PROMPTS[0], 48, chat=True))
    assert streamed == results[0].text
    with specstep.load(folder) as other:
        assert other.generate(PROMPTS[1], 48, chat=True).token_ids == results[1].token_ids


@torch.no_grad()
def test_every_token_is_what_the_target_would_say(results):
    """transformers in float32 reads each answer: every token is its own choice, or within bfloat16's rounding of it."""
    model = load_source("smollm2-135m", "float32", "cpu").model
    same = total = 0
    for result in results:
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        logits = model(ids).logits[0, len(result.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        behind = logits.max(1).values - chosen
        assert behind.max() < NEAR, f"token {int(behind.argmax())} of {result.text!r} is {behind.max():.2f} behind"
        same, total = same + int((behind == 0).sum()), total + len(result.token_ids)
    assert same > 0.9 * total


def test_weights_are_in_memory_once(folder):
    """Of two loaded engines each maps the file once, for both programs; no page of it is copied. With what is private
    to the process it takes at most a quarter more than weights and caches."""
    done = subprocess.run([sys.executable, "-c", MEMORY, folder], capture_output=True, text=True, check=True)
    found, size = json.loads(done.stdout), (folder / WEIGHTS).stat().st_size
    caches = sum(2 * math.prod(tensor.shape) for tensor in read_manifest(folder).spec.caches)
    assert found["copied"] > 0.7 * size, "the measure would not see a copy"
    assert size + found["grown"] < 1.25 * (size + caches)
    assert all(mapping["Anonymous:"] == 0 for mapping in found["mapped"])
    assert [round(mapping["size"] / size, 2) for mapping in found["mapped"]] == [1.0, 1.0]
    assert sum(mapping["Rss:"] for mapping in found["mapped"]) > 0.5 * size


FORMS = [
    {"json": {"type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
              "required": ["city", "people"], "additionalProperties": False}},
    {"json_object": True},
    {"regex": "[A-Z][a-z]+( [a-z]+){3,30}[.]"},
    {"choice": ["blue", "green", "it depends on the light"]},
]  # fmt: skip


def test_drafts_change_no_structured_text(folder):
    """A real tokenizer, whose tokens cross what a grammar is made of; greedy and sampled."""
    asked = [{"structured": form, "temperature": warm, "seed": 1} for form in FORMS for warm in (0.0, 0.8)]
    prompt, texts = "Describe the largest city of France.", []
    for nodes in ("all", 0):
        with specstep.load(folder, nodes=nodes, learning=False) as engine:
            results = [engine.generate(prompt, 60, chat=True, sampling=sampling) for sampling in asked]
        texts.append([result.token_ids for result in results])
        assert {result.finish_reason for result in results} >= {"stop"}
    assert texts[0] == texts[1]

"""The default model, end to end: greedy output equals transformers, token for token, in float32."""

import json

import pytest
import specstep
import torch
from models import greedy, save_eagle3_for
from specstep.compile.locate import ALIASES
from specstep.compile.source import load_source

PROMPTS = [
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "List the first ten prime numbers.",
    "Translate to French: The cat sleeps on the chair.",
    "def fibonacci(n):",
    "Summarize: The quick brown fox jumps over the lazy dog. The dog does not mind. The fox jumps again.",
    "What is 12 * 13? Think step by step.",
    "Repeat after me: one two three, one two three, one two three.",
    "Give me a recipe for pancakes with exact amounts.",
    "¿Cuál es la capital de España?",
    "请用一句话介绍北京。",
    "Correct the grammar: he go to school yesterday and buyed a book.",
    "Name three differences between TCP and UDP.",
    "Write a JSON object with the keys name, age and city.",
    "Tell me a very short story about a robot who learns to paint.",
    "SELECT name, COUNT(*) FROM users",
    "Who wrote Romeo and Juliet, and when?",
    "Continue the sequence: 2, 4, 8, 16,",
    "Explain recursion to a five-year-old.",
    "A train leaves at 3 pm at 60 km/h. When has it covered 150 km?",
    "Write an email to my landlord about a broken heater.",
    "x",
    "🙂🙃🙂🙃🙂",
    "The following is a list of animals: cat, dog, horse, cow, cat, dog, horse, cow, cat,",
]


@pytest.fixture(scope="module")
def source():
    import importlib.util

    package = ALIASES["smollm2-135m"][0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the default model is not installed: {ALIASES['smollm2-135m'][2]}")
    return load_source("smollm2-135m", "float32", "cpu")


@pytest.fixture(autouse=True)
def all_threads(one_thread):
    """A real model is worth all cores, shared with the other workers."""
    import os

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max((os.cpu_count() or 1) // workers, 1))


@pytest.fixture(scope="module")
def model_folder(source, tmp_path_factory):
    """The default model as an HF directory, so that it is converted once."""
    folder = tmp_path_factory.mktemp("smollm2")
    source.model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafters(source, model_folder, tmp_path_factory):
    """Name -> build options: no drafts, n-grams, the target's own first layers as a draft model, a random head."""
    small = tmp_path_factory.mktemp("draft")
    source.tokenizer.save_pretrained(small)
    config = json.loads((model_folder / "config.json").read_text()) | {"num_hidden_layers": 4}
    from transformers import AutoConfig, AutoModelForCausalLM

    (small / "config.json").write_text(json.dumps(config))
    first = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small), dtype=torch.float32)
    first.load_state_dict({k: v for k, v in source.model.state_dict().items() if k in first.state_dict()})
    first.save_pretrained(small)
    head = save_eagle3_for(tmp_path_factory.mktemp("head"), source.model)
    return {
        "none": {"drafter": "none"},
        "ngram": {"drafter": "ngram"},
        "default": {"drafter": "default"},
        "model": {"drafter": str(small), "nodes": 3},
        "eagle3": {"drafter": str(head), "tree": "dynamic", "nodes": 8, "depth": 3, "top_k": 3},
        "ngram,eagle3": {"drafter": f"ngram,{head}", "nodes": 8},
    }


@pytest.fixture(scope="module")
def sweep(source):
    """Token ids of all prompts as chat turns, and transformers' own answers of up to 128 tokens."""
    text = source.tokenizer.apply_chat_template
    ids = [text([{"role": "user", "content": p}], add_generation_prompt=True).input_ids for p in PROMPTS]
    return ids, answers(source, ids, 128)


def answers(source, ids, new_tokens):
    """transformers' own greedy answers."""
    before = source.model.config._attn_implementation
    source.model.set_attn_implementation("sdpa")
    try:
        return [greedy(source.model, prompt, new_tokens, list(source.stop_ids)) for prompt in ids]
    finally:
        source.model.set_attn_implementation(before)


@pytest.mark.parametrize("drafter", ["ngram,eagle3", pytest.param("ngram", marks=pytest.mark.slow)])
def test_a_handful_equals_transformers(drafter, source, model_folder, drafters):
    engine = specstep.eager(str(model_folder), dtype="float32", max_seq_len=256, max_batch=2, **drafters[drafter])
    ids = [engine.request(prompt, chat=True).prompt for prompt in PROMPTS[:3]]
    assert [result.token_ids for result in engine.generate(ids, 24)] == answers(source, ids, 24)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "ngram", "default", "model", "eagle3"])
def test_every_prompt_equals_transformers(drafter, sweep, model_folder, drafters, tmp_path):
    """The compiled engine, 24 prompts of 128 tokens."""
    options = {"dtype": "float32", "max_seq_len": 384} | drafters[drafter]
    engine = specstep.load(specstep.build(str(model_folder), tmp_path / "engine", **options))
    ids, expected = sweep
    assert [result.token_ids for result in engine.generate(ids, 128)] == expected


def test_gguf_and_directory_hold_the_same_tokenizer(source, model_folder):
    engine_text = load_source(str(model_folder), "float32", "cpu").tokenizer
    for prompt in PROMPTS:
        assert engine_text(prompt).input_ids == source.tokenizer(prompt).input_ids

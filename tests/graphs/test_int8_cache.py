"""Engines whose keys and values are kept as integers of eight bits."""

import math

import pytest
import specstep
from models import save_model
from specstep.commands.describe import describe
from specstep.errors import BuildError
from specstep.kernels.int8_rows import row_bytes
from specstep.runtime.engine_file import EngineSpec, read_manifest
from specstep.runtime.prefix_cache import BLOCK

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9]]
SIZES = {"dtype": "float32", "max_batch": 4, "max_seq_len": 192, "prefill_chunk": 16}


def texts(engine: specstep.Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [result.token_ids for result in engine.generate(prompts, 60, ignore_eos=True)]


def cache_bytes(spec: EngineSpec) -> int:
    return sum(tensor.nbytes for tensor in spec.caches)


@pytest.mark.parametrize("drafter", ["ngram", "head"])
def test_drafts_rows_and_prefixes_change_no_text(drafter, model_folder, head_folder):
    named = str(head_folder) if drafter == "head" else drafter
    with specstep.eager(str(model_folder), drafter="none", kv_cache="int8", **SIZES) as engine:
        expected = [texts(engine, [prompt])[0] for prompt in PROMPTS]
    kept = {"prefix_cache_bytes": 2**22}
    with specstep.eager(str(model_folder), drafter=named, kv_cache="int8", **SIZES, **kept) as engine:
        slots, prefixes = engine.spec.caches[0].shape[2], engine._scheduler._rows.prefixes
        whole = sum(math.prod(tensor.shape[1:]) for tensor in engine.spec.caches)
        assert prefixes.block_bytes * slots == BLOCK * whole  # a byte each
        assert texts(engine, PROMPTS) == expected
        longer = [prompt + text[:40] for prompt, text in zip(PROMPTS, expected, strict=True)]
        again = engine.generate(longer, 20, ignore_eos=True)
    assert [result.token_ids for result in again] == [text[40:] for text in expected]
    assert sum(result.stats["cached_tokens"] for result in again) > 0
    assert sum(result.stats["steps"] for result in again) < sum(len(result.token_ids) for result in again)


def test_it_is_what_the_plain_cache_is_but_for_rounding(model_folder):
    """Greedy choices agree until two logits are close; memory is that of the numbers and a scale."""
    found = {}
    for kind in ("auto", "int8"):
        with specstep.eager(str(model_folder), drafter="none", kv_cache=kind, **SIZES) as engine:
            asked = {"ignore_eos": True, "sampling": {"logprobs": 3}}
            found[kind] = engine.generate(PROMPTS, 1, **asked), cache_bytes(engine.spec), engine.spec
    for plain, rounded in zip(found["auto"][0], found["int8"][0], strict=True):
        assert rounded.token_ids == plain.token_ids
        assert rounded.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob, abs=0.05)
    assert [r.logprobs for r in found["auto"][0]] != [r.logprobs for r in found["int8"][0]]  # so that it is in use
    head = found["auto"][2].caches[0].shape[3]
    assert found["int8"][1] * 4 * head == found["auto"][1] * row_bytes(head)


@pytest.mark.slow
def test_compiled_drafts_change_no_text(tmp_path):
    # Logits are close to each other: a last bit that differs soon changes a token.
    model = str(save_model(tmp_path / "model", initializer_range=0.1, intermediate_size=61))
    sizes = SIZES | {"dtype": "bfloat16", "kv_cache": "int8"}
    folder = specstep.build(model, str(tmp_path / "engine"), drafter="ngram", nodes=6, **sizes)
    assert f"{cache_bytes(read_manifest(folder).spec) / 2**20:.0f} MiB at most, int8" in describe(read_manifest(folder))
    with specstep.load(folder, nodes=0) as engine:
        expected = [texts(engine, [prompt])[0] for prompt in PROMPTS]
    with specstep.load(folder, nodes="all") as engine:
        got = engine.generate(PROMPTS, 60, ignore_eos=True)
    assert [result.token_ids for result in got] == expected
    assert sum(result.stats["steps"] for result in got) < sum(len(result.token_ids) for result in got)


def test_what_does_not_take_it_says_so(model_folder, tmp_path):
    with pytest.raises(BuildError, match="kv_cache: expected auto for backend onnx, got int8; inductor takes it"):
        specstep.build(str(model_folder), tmp_path / "it", backend="onnx", kv_cache="int8")
    with pytest.raises(BuildError, match="kv_cache: expected auto with device cuda, got int8; device cpu takes it"):
        specstep.build(str(model_folder), tmp_path / "it", device="cuda", kv_cache="int8", compute_capability=("9.0",))
    with pytest.raises(BuildError, match="kv_cache: expected auto or int8, got fp8"):
        specstep.build(str(model_folder), tmp_path / "it", kv_cache="fp8")

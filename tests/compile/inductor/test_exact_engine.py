"""Engines of low precision say the same with drafts and without, alone and in a batch, bit for bit."""

import sys
from pathlib import Path

import pytest
import specstep
import torch
from models import ARCHITECTURES, save_model
from quantized_files import CASES, save_quantized
from specstep import SamplingParams
from specstep.compile.source import load_source
from specstep.runtime.engine_file import read_manifest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from model_table import PAGE, has_router, small_config

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9], [7, 300, 7, 300, 7]]
# With a layer of each kind they compile in half the time; `.ci/run` has them.
FEW_LAYERS = {
    "Llama": {"num_hidden_layers": 1},
    "Qwen3Next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
MIXTURES = (
    "afmoe", "aria_text", "axk1", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4_text", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba",
    "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "llama4_text", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        *((name, "bfloat16") for name in ARCHITECTURES),
        *((name, "int8") for name in ("Llama", "GPT2", "Qwen3Moe")),
        *((name, "int4") for name in ("Llama", "GptOss")),
        *((name, weights) for name in ("Qwen3Next", "Lfm2", "Mamba2") for weights in ("int8", "int4")),
    ],
)
def test_drafts_change_no_text(architecture, weights, tmp_path):
    # Little variance: logits are close to each other, and a last bit that differs soon changes a token.
    # No multiple of a vector, where that is not the size of experts.
    sizes = {} if architecture in ("GPT2", "DeepseekV3", "Jamba", "MiniMax") else {"intermediate_size": 61}
    sizes |= FEW_LAYERS.get(architecture, {})
    model = str(save_model(tmp_path / "model", architecture, initializer_range=0.1, **sizes))
    options = {"dtype": "bfloat16", "weights": weights, "max_seq_len": 160, "prefill_chunk": 32}
    drafted = specstep.build(model, str(tmp_path / "drafted"), drafter="ngram", nodes=6, max_batch=3, **options)
    kinds = read_manifest(drafted).about["weights"]
    assert (weights in kinds) and (weights == "bfloat16" or kinds[weights] > kinds.get("bfloat16", 0))
    with specstep.load(drafted, nodes=0) as engine:
        expected = [engine.generate(prompt, 90, ignore_eos=True) for prompt in PROMPTS]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with specstep.load(drafted, nodes="all") as engine:
                got = engine.generate(PROMPTS, 90, ignore_eos=True)
            assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    finally:
        torch.set_num_threads(before)
    assert sum(result.stats["steps"] for result in got) < sum(len(result.token_ids) for result in got)
    assert len({token for result in got for token in result.token_ids}) > len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int4"])
def test_an_engine_without_a_drafter_says_the_same(weights, tmp_path):
    model = str(save_model(tmp_path / "model", "Llama", initializer_range=0.1, intermediate_size=61))
    options = {"dtype": "bfloat16", "weights": weights, "max_seq_len": 160, "prefill_chunk": 32}
    said = []
    for drafter in ("none", "ngram"):
        folder = specstep.build(model, str(tmp_path / drafter), drafter=drafter, **options)
        with specstep.load(folder, nodes="all") as engine:
            said.append([engine.generate(prompt, 90, ignore_eos=True).token_ids for prompt in PROMPTS])
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq 8", "modelopt nvfp4"])
def test_the_integers_of_a_checkpoint_run_as_they_are(name, tmp_path):
    config, write, kind = CASES[name]
    torch.manual_seed(0)
    save_quantized(tmp_path / "model", config, write)
    model = load_source(str(tmp_path / "model"), "float32", "cpu").model
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0, -1].log_softmax(-1)
    options = {"max_seq_len": 160, "prefill_chunk": 32, "drafter": "ngram", "nodes": 6, "max_batch": 3}
    folder, said = specstep.build(str(tmp_path / "model"), str(tmp_path / "it"), dtype="bfloat16", **options), []
    held = read_manifest(folder).about["weights"]
    assert held.keys() == {kind, "bfloat16"} and held["bfloat16"] == 2 * model.lm_head.weight.numel()
    for nodes in (0, "all"):
        with specstep.load(folder, nodes=nodes) as engine:
            said.append(engine.generate(PROMPTS, 60, ignore_eos=True, sampling=SamplingParams(logprobs=5)))
    assert [result.token_ids for result in said[0]] == [result.token_ids for result in said[1]]
    assert [result.logprobs for result in said[0]] == [result.logprobs for result in said[1]]
    likeliest = said[0][1].logprobs[0].top  # of a prompt of one token: attention of such weights amplifies rounding
    off = max(abs(float(expected[token]) - logprob) for token, logprob in likeliest)
    assert off < 0.1 * expected.std(), "as far as bfloat16 and inputs of eight bits explain"


def note_caches(engine):
    """What the caches of rows hold when they end: (a row's tokens, its keys and values of each layer) of each."""
    session, noted = engine.session, []
    release = session.release

    def release_noted(row):
        tokens = session.numpy("history", row)[: session.lengths[row]].tolist()
        noted.append((tokens, {name: cache[row].clone() for name, cache in session.caches.items()}))
        release(row)

    session.release = release_noted
    return noted


def cached_bits(noted, text):
    """The bytes of all keys and values of a text, but for its last two tokens: a row ends without them."""
    count = len(text) - 2
    [*_, caches] = [caches for tokens, caches in noted if tokens[:count] == text[:count]]
    return {name: cache[:, :count].contiguous().view(torch.uint8) for name, cache in caches.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "rows", "dtype"),
    [
        *((model_type, rows, "bfloat16") for model_type in MIXTURES for rows in (1, 4)),
        *((model_type, 4, "float32") for model_type in ("deepseek_v3", "gemma4_text", "mixtral", "qwen3_next")),
    ],
)
def test_drafts_change_no_logits_of_a_mixture(model_type, rows, dtype, tmp_path):
    """Routers 1,024 deep, with the experts and choices that transformers gives the class: there PyTorch adds one row
    in another order than eight, and its compiler writes reductions of one row in another way than those of several.
    Log-probabilities are what a request is told of its logits; what goes from layer to layer is in keys and values."""
    config = small_config(CONFIG_MAPPING[model_type], routed_width=1024)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    options = {"dtype": dtype, "max_seq_len": 128, "prefill_chunk": 32, "drafter": "ngram", "nodes": 6}
    folder, said = specstep.build(str(tmp_path / "model"), str(tmp_path / "it"), max_batch=rows, **options), []
    assert read_manifest(folder).about["drafts_may_change_text"] == []
    cached = []
    for nodes in (0, "all"):
        with specstep.load(folder, nodes=nodes) as engine:
            cached.append(note_caches(engine))
            together = PROMPTS if nodes else [[prompt] for prompt in PROMPTS]
            asked = {"ignore_eos": True, "sampling": {"logprobs": 20}}
            for _ in range(2):  # what was learned of a text is drafted when it is asked for again
                said.append([engine.generate(prompts, 60, **asked) for prompts in together])
    plain, drafted = [result for results in said[0] for result in results], said[-1]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert [each.logprobs for each in drafted] == [each.logprobs for each in plain]
    for prompt, each in zip(PROMPTS, plain, strict=True):
        expected, got = (cached_bits(noted, prompt + each.token_ids) for noted in cached)
        assert expected and all(torch.equal(got[name], bits) and bits.any() for name, bits in expected.items())
    assert sum(each.stats["steps"] for each in drafted) < sum(len(each.token_ids) for each in drafted)


def test_no_mixture_of_the_page_is_left_out():
    """docs/models.md says which classes work."""
    rows = [[cell.strip() for cell in line.split("|")] for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    works = [row[1] for row in rows if row[3].startswith("works")]
    assert [kind for kind in works if has_router(CONFIG_MAPPING[kind]())] == list(MIXTURES)

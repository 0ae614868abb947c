"""On an NVIDIA GPU: engines replayed as CUDA graphs say what transformers says. Run by `make gpu-check`. Any machine
builds the engines ahead: `make gpu-engines`."""

import json

import pytest
import specstep
import torch
from gpu_case import (
    BUILD_FOR,
    CHOICES,
    PROMPTS,
    SIZES,
    answers,
    check_engine,
    engine_of,
    expected_answers,
    flips,
    options_of,
)
from models import logit_gap, save_eagle3, save_model, tiny_model
from specstep.runtime.tensorrt.library import LibraryError, load_library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not BUILD_FOR, reason="needs an NVIDIA GPU"),
]

GUESSED = ("ngram", "right dynamic", "mixed dynamic")  # choices whose drafts are sometimes right
MODELS = {  # what other attention and other layers are checked with
    "Mistral": "head dynamic",  # a window
    "Gemma3Text": "ngram",  # a window in some layers, norms of queries and keys
    "GptOss": "head dynamic",  # sinks, windows, experts with biases
    "Qwen3Moe": "ngram",  # experts
    "DeepseekV3": "ngram",  # latent attention, experts in groups
    "Qwen3Next": "head dynamic",  # the gated delta rule, experts
    "Lfm2": "ngram",  # short convolutions
    "GraniteMoeHybrid": "ngram",  # Mamba-2
    "FalconMamba": "ngram",  # Mamba-1, no attention at all
    "MiniMax": "ngram",  # lightning attention, experts
    "Rwkv": "ngram",  # sums that fade, and a shift of tokens
}
MOST = {"float16": 0.05, "bfloat16": 0.4}  # gap of rounding, see `logit_gap`
MOST_FP8 = 1.0
LOW = ("none", "ngram", "right dynamic", "head chain", "head static", "head dynamic")


@pytest.fixture(autouse=True)
def no_input_is_copied(capfd):
    """A program says on stderr that it copies an input which does not begin at a multiple of 16 bytes."""
    yield
    assert "not aligned" not in capfd.readouterr().err


@pytest.mark.parametrize("choice", CHOICES)
def test_float32_drafters_equal_transformers(choice, model_folder, drafter_folder, tmp_path, record_property):
    options = options_of(choice, save_eagle3(tmp_path / "head"), model_folder, drafter_folder)
    folder = engine_of(f"{choice}-float32", model_folder, tmp_path / "engine", dtype="float32", **options)
    told = check_engine(folder, expected_answers("Llama"))
    record_property("told", told)
    assert told["accepted"] > 0 or choice not in GUESSED


@pytest.mark.parametrize("architecture", MODELS)
def test_float32_models_equal_transformers(architecture, tmp_path, record_property):
    model = save_model(tmp_path / "model", architecture)
    options = options_of(MODELS[architecture], save_eagle3(tmp_path / "head"), model)
    folder = engine_of(architecture, model, tmp_path / "engine", dtype="float32", **options)
    record_property("told", check_engine(folder, expected_answers(architecture)))


def test_float32_any_number_of_nodes(model_folder, tmp_path):
    """The choice of nodes changes the size of steps from one to the next."""
    folder = engine_of("ngram-float32", model_folder, tmp_path / "engine", dtype="float32", **CHOICES["ngram"])
    with specstep.load(folder, nodes="auto") as engine:
        for at_once in (1, 4, 8):
            assert answers(engine, at_once) == expected_answers("Llama")


@pytest.fixture(scope="session")
def plain_answers(once, model_folder):
    """`plain_answers(dtype)`: what an engine without a drafter says."""

    def answers_of(dtype):
        def make(folder):
            kept = engine_of(f"none-{dtype}", model_folder, folder / "engine", dtype=dtype, **CHOICES["none"])
            folder.mkdir(exist_ok=True)  # no engine was built there
            with specstep.load(kept) as engine:
                (folder / "answers.json").write_text(json.dumps(answers(engine, 8)))

        return json.loads((once(f"plain-{dtype}", make) / "answers.json").read_text())

    return answers_of


@pytest.mark.parametrize("choice", LOW)
@pytest.mark.parametrize("dtype", MOST)
def test_low_precision_drafts_change_nothing_but_ties(
    dtype, choice, plain_answers, model_folder, tmp_path, record_property
):
    """Where a drafter's answer parts from the plain one, it is by rounding: the two tokens are all but equal."""
    model = tiny_model("Llama")
    if choice == "none":
        said = plain_answers(dtype)
    else:
        options = options_of(choice, save_eagle3(tmp_path / "head"), model_folder)
        folder = engine_of(f"{choice}-{dtype}", model_folder, tmp_path / "engine", dtype=dtype, **options)
        with specstep.load(folder, nodes="all", learning=False) as engine:
            said = answers(engine, 8)
    found = flips(model, plain_answers(dtype), said)
    record_property("flips", found)
    for prompt, tokens in zip(PROMPTS, said, strict=True):
        assert logit_gap(model, prompt, tokens) <= MOST[dtype]
    assert logit_gap(model, PROMPTS[0], [(token + 1) % 320 for token in said[0]]) > MOST[dtype]
    assert all(flip["gap"] <= MOST[dtype] for flip in found), found


@pytest.mark.parametrize("choice", ["ngram", "head dynamic"])
@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensorrt_equals_transformers(backend, choice, model_folder, tmp_path):
    try:
        load_library(backend)
    except LibraryError as error:
        pytest.skip(str(error))
    options = options_of(choice, save_eagle3(tmp_path / "head"), model_folder) | SIZES | {"max_batch": 4}
    folder = specstep.build(str(model_folder), tmp_path / "engine", backend=backend, dtype="float32", **options)
    expected = expected_answers("Llama")
    with specstep.load(folder) as engine:
        for _ in range(2):  # the second time all steps are replays
            for at_once in (1, 4):
                assert answers(engine, at_once) == expected


@pytest.mark.parametrize("choice", ["none", "ngram"])
def test_low_precision_weights_of_eight_bits(choice, model_folder, tmp_path, record_property):
    """fp8 weights, and what they are multiplied with: the text is nearly that of the model as it was."""
    options = {"dtype": "bfloat16", "weights": "fp8"} | CHOICES[choice]
    folder = engine_of(f"{choice}-fp8", model_folder, tmp_path / "engine", **options)
    model = tiny_model("Llama")
    with specstep.load(folder, nodes="all", learning=False) as engine:
        said = answers(engine, 8)
        assert answers(engine, 8) == said, "replays"
    gaps = [round(logit_gap(model, prompt, tokens), 3) for prompt, tokens in zip(PROMPTS, said, strict=True)]
    record_property("gaps", gaps)
    assert max(gaps) <= MOST_FP8
    assert logit_gap(model, PROMPTS[0], [(token + 1) % 320 for token in said[0]]) > MOST_FP8

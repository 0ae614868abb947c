"""What is not finite never leaves its node: drafts whose keys and values are NaN are rejected, and the text stays."""

import shutil
from pathlib import Path

import pytest
import specstep
import torch
from models import save_model
from safetensors.torch import load_file, save_file
from specstep.graphs.tree import Candidates

NAN, INFINITY = float("nan"), float("inf")
SLOW = [(NAN, "onnx"), (INFINITY, "onnx"), (NAN, "inductor"), (INFINITY, "inductor")]
PROMPTS = [[5, 6, 7] * 4, [40, 41, 42] * 5, list(range(30, 52))]
LENGTH = 30
OPTIONS = {"dtype": "float32", "max_batch": 3, "max_seq_len": 96, "prefill_chunk": 8}
# As the tests' engine has it.
ENGINE = {"drafter": "ngram", "dtype": "float32", "max_batch": 2, "max_seq_len": 192, "prefill_chunk": 16}


class Spoilt(specstep.Scorer):
    """Drafts, after every token, one whose embedding is not finite, and beside it what follows in the answers."""

    neural = False

    def __init__(self, spoilt: int, answers: list[list[int]]):
        super().__init__()
        following = torch.zeros(320, dtype=torch.int64)
        for answer in answers:
            following[answer[:-1]] = torch.tensor(answer[1:])
        self.register_buffer("following", following)
        self.spoilt = spoilt

    def begin(self, state, keys, values, shape):
        root = state["history"].gather(1, state["lengths"][:, None])
        return self._children(root), lambda tokens, parents: self._children(tokens), {}

    def _children(self, tokens):
        right = self.following[tokens]
        children = torch.stack([torch.full_like(right, self.spoilt), right], 2)
        return Candidates(children, torch.tensor([0.6, 0.4], device=tokens.device).log().expand(children.shape))


def spoil(folder: Path, token: int, value: float) -> None:
    """Have that token's embedding be a number that is not finite."""
    weights = load_file(folder / "model.safetensors")
    [name] = [name for name in weights if name.endswith(("embed_tokens.weight", "embeddings.weight"))]
    weights[name][token] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "backend", "architecture", "kv_cache"),
    [
        *((value, at, "Llama", "auto") for value in (NAN, INFINITY) for at in ("library", "reference")),
        *((NAN, "library", architecture, "auto") for architecture in ("Qwen3Next", "DeepseekV3", "Mamba2")),
        (INFINITY, "library", "Llama", "int8"),
        *(pytest.param(*case, "Llama", "auto", marks=pytest.mark.slow) for case in SLOW),
    ],
    ids=str,
)
def test_rejected_drafts_that_are_not_finite_change_no_text(
    value: float, backend: str, architecture: str, kv_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", architecture, tokenizer=True, tie_word_embeddings=False)
    options = OPTIONS | {"kv_cache": kv_cache}
    with specstep.eager(str(folder), drafter="none", **options) as plain:
        answers = [result.token_ids for result in plain.generate(PROMPTS, LENGTH, ignore_eos=True)]
    # No token of a prompt, of an answer, or of the texts with which the build compares models.
    compared = torch.randint(0, 320, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    spoilt = min(set(range(2, 320)) - {token for text in (*PROMPTS, *answers, compared) for token in text})
    spoil(folder, spoilt, value)
    options |= {"drafter": Spoilt(spoilt, answers), "tree": "dynamic", "depth": 3, "top_k": 2, "nodes": 6}
    if backend == "reference":
        monkeypatch.setattr("specstep.kernels.tree_attention.op.has_library", lambda: False)
    if backend in ("library", "reference"):
        engine = specstep.eager(str(folder), **options)
    else:
        built = specstep.build(str(folder), tmp_path / "engine", backend=backend, **options)
        engine = specstep.load(built, nodes="all")
    with engine:
        for _ in range(2):  # then in rows and behind blocks of prompts that held rejected drafts
            got = engine.generate(PROMPTS, LENGTH, ignore_eos=True)
            assert [result.token_ids for result in got] == answers
            assert sum(result.stats["steps"] for result in got) < 2 * LENGTH  # drafts beside the spoilt ones are right
        engine.generate([[spoilt, 9, *PROMPTS[0]]] * 3, 4, ignore_eos=True)  # rows that are not finite themselves
        longer = [[*prompt, *answer[:9]] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        got = engine.generate(longer, LENGTH - 9, ignore_eos=True)
        assert [result.token_ids for result in got] == [answer[9:] for answer in answers]


@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_compiled_engine_rejects_them(value: float, model_folder: Path, engine_folder: Path, tmp_path: Path) -> None:
    """As above; here the drafts are those of a prediction, so that the programs are those of the tests' engine."""
    with specstep.load(engine_folder, nodes=0) as plain:
        answers = [result.token_ids for result in plain.generate(PROMPTS, LENGTH, ignore_eos=True)]
    compared = torch.randint(0, 320, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    spoilt = min(set(range(2, 320)) - {token for text in (*PROMPTS, *answers, compared) for token in text})
    folder = shutil.copytree(model_folder, tmp_path / "model")
    spoil(folder, spoilt, value)
    predictions = [
        [token for at in range(0, LENGTH, 4) for token in (*answer[at : at + 4], spoilt)] + answer for answer in answers
    ]
    with specstep.load(specstep.build(str(folder), tmp_path / "engine", **ENGINE), nodes="all") as engine:
        for _ in range(2):
            got = engine.generate(PROMPTS, LENGTH, ignore_eos=True, prediction=predictions)
            assert [result.token_ids for result in got] == answers
            assert all(result.stats["rejected_prediction_tokens"] > 3 for result in got)
        longer = [[*prompt, *answer[:9]] for prompt, answer in zip(PROMPTS, answers, strict=True)]
        got = engine.generate(longer, LENGTH - 9, ignore_eos=True)
        assert [result.token_ids for result in got] == [answer[9:] for answer in answers]

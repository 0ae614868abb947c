"""Sampled texts are those of plain decoding by transformers, whatever is drafted and whoever is in the batch.

Penalties, bans and the rest see the tokens that were committed and a node's own path: a draft that did not come true
would change the text.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import specstep
import torch
from models import save_eagle3, save_model, tiny_model
from plain_sampling import Asked
from specstep.kernels.bits import pack_bits
from specstep.kernels.noise import gumbel

NEW_TOKENS, VOCABULARY = 20, 320


class Job(NamedTuple):
    prompt: list[int]
    asked: Asked
    logprobs: int = -1


REPEATED, ORDERED = [40, 41, 42] * 9, list(range(30, 83))
JOBS = [
    Job(REPEATED, Asked(temperature=1.0, seed=7), 3),
    Job(ORDERED, Asked()),
    Job([7, 8], Asked(temperature=0.6, top_k=5, top_p=0.9, min_p=0.05, seed=2**40), 0),
    Job([5], Asked(temperature=1.5, top_p=0.95, presence_penalty=1.0, frequency_penalty=0.5, seed=11)),
    Job(ORDERED, Asked(repetition_penalty=1.3, frequency_penalty=0.7, stop_ids=[201, 247], min_new_tokens=9), 20),
    Job(
        REPEATED,
        Asked(
            temperature=0.9,
            top_k=40,
            bias={4: 3.0, 5: -2.0},
            bad_words=[[201, 114], [133, 201, 159], [9], [22, 86]],
            seed=3,
        ),
        1,
    ),
]
TREES: list[dict[str, Any]] = [
    {"tree": "dynamic", "nodes": 7, "depth": 3, "top_k": 3},
    {"tree": "chain", "nodes": 3},
    {"tree": "static", "nodes": 7, "depth": 3, "top_k": 3},
]
KINDS = ["ngram", "small", "target", "head", "ngram,small,head", "published"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, published_heads):
    folder = tmp_path_factory.mktemp("sampled")
    save_model(folder / "target")
    save_eagle3(folder / "head")
    (folder / "published").write_text(published_heads)
    save_model(folder / "small", seed=1, num_hidden_layers=2, hidden_size=32)
    return folder


@pytest.fixture(scope="module")
def plain():
    """What transformers' model and processors say, token by token: texts, and the log-probabilities at each place."""
    model, found = tiny_model("Llama"), []
    with torch.no_grad():
        for job in JOBS:
            tokens, log_probs = list(job.prompt), []
            for _ in range(NEW_TOKENS):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                log_probs.append(logits.log_softmax(-1))
                scores = job.asked.scores(len(job.prompt), tokens, logits)
                if job.asked.temperature > 0:
                    place = torch.tensor([len(tokens)])
                    scores = scores + gumbel(torch.tensor([job.asked.seed]), place, torch.arange(VOCABULARY))
                tokens.append(int(scores.argmax()))
                if tokens[-1] in job.asked.stop_ids:
                    break
            found.append((tokens[len(job.prompt) :], log_probs))
    return found


def texts(engine, jobs):
    """All jobs in the batch at once: of each, its tokens, their log-probabilities, and how many steps it took."""
    session, rows = engine.session, {}
    for place, job in enumerate(jobs):
        controls = job.asked.controls(len(job.prompt)) | {"logprobs": job.logprobs}
        limit = len(job.prompt) + NEW_TOKENS
        rows[session.admit(job.prompt, limit, job.asked.stop_ids, controls)] = place
    found: list[tuple[list[int], list[Any], list[int]]] = [([], [], []) for _ in jobs]
    running = set(rows)
    while running:
        for row, report in session.step().items():
            if row in running:
                tokens, log_probs, steps = found[rows[row]]
                tokens += report.tokens
                log_probs += report.logprobs
                steps.append(len(report.tokens))
                running -= {row} if report.finish else set()
    for row in rows:
        session.release(row)
    return found


def check(job, got, expected):
    """A text is the plain one, and so are the log-probabilities that were asked for."""
    tokens, log_probs, _ = got
    text, places = expected
    assert tokens == text
    assert len(log_probs) == (len(tokens) if job.logprobs >= 0 else 0)
    for told, token, place in zip(log_probs, tokens, places, strict=False):
        assert told.token_id == token
        assert told.logprob == pytest.approx(place[token].item(), abs=1e-4)
        best = place.sort(descending=True, stable=True).indices[: job.logprobs].tolist()
        assert [token for token, _ in told.top] == best
        assert [value for _, value in told.top] == pytest.approx(place[best].tolist(), abs=1e-4)


def engine_for(folder, kind, tree):
    names = [name if name in ("none", "ngram") else str(folder / name) for name in kind.split(",")]
    names = [Path(name).read_text() if name.endswith("published") else name for name in names]
    given = {"dtype": "float32", "max_batch": 4, "max_seq_len": 128, "prefill_chunk": 16} | tree
    return specstep.eager(str(folder / "target"), drafter=",".join(names), **given)


@pytest.mark.parametrize(("kind", "tree"), [("none", {}), *((kind, tree) for kind in KINDS for tree in TREES)], ids=str)
def test_texts_are_those_of_plain_decoding(kind, tree, folder, plain):
    engine = engine_for(folder, kind, tree)
    for group in ([0, 1, 2, 3], [5, 4, 0, 2], [3]):
        got = texts(engine, [JOBS[place] for place in group])
        for place, one in zip(group, got, strict=True):
            check(JOBS[place], one, plain[place])
    if kind == "target":  # a perfect drafter, and one that knows the noise
        sampled, greedy = (steps for _, _, steps in texts(engine, JOBS[:2]))
        assert min(greedy[1:-1]) >= 3 and sum(sampled) / len(sampled) > 2


@pytest.mark.parametrize(("kind", "tree"), [("none", {}), ("target", TREES[0]), ("ngram,head", TREES[2])], ids=str)
def test_what_may_follow_each_node_is_said_before_the_step(kind, tree, folder):
    """A toy grammar: which tokens may follow depends on the one before. Rows with a mask and without in one batch."""
    permitted = (torch.arange(VOCABULARY)[:, None] * 7 + torch.arange(VOCABULARY)) % 3 != 0  # [token, next]
    engine, model = engine_for(folder, kind, tree), tiny_model("Llama")
    session, heats = engine.session, (0.8, 0.0, 0.8)
    for row, heat in enumerate(heats):
        controls = Asked(temperature=heat, seed=5).controls(len(ORDERED)) | {"masked": int(row < 2)}
        assert session.admit(ORDERED, len(ORDERED) + NEW_TOKENS, [], controls) == row
    found = [list(ORDERED) for _ in heats]
    for _ in range(NEW_TOKENS):
        for row in (0, 1):
            drafted = session.tree(row)
            assert drafted.tokens[0] == found[row][-1] and drafted.parents[0] == -1
            session.allow(row, pack_bits(permitted[torch.tensor(drafted.tokens)]).numpy())
        for row, report in session.step().items():
            found[row] += report.tokens
    for row, heat in enumerate(heats):
        tokens = list(ORDERED)
        for _ in range(NEW_TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            if row < 2:
                logits = logits.where(permitted[tokens[-1]], -torch.inf)
            if heat:
                noise = gumbel(torch.tensor([5]), torch.tensor([len(tokens)]), torch.arange(VOCABULARY))
                logits = logits / heat + noise
            tokens.append(int(logits.argmax()))
        assert found[row] == tokens
    assert found[0] != found[2]

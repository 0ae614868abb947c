"""A build says what its drafts are worth, and warns of a neural drafter that is never right."""

import pytest
import specstep
from models import save_model, tiny_model, tiny_tokenizer
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.inductor import lower as inductor
from specstep.compile.source import Source
from specstep.compile.try_drafts import QUESTION, try_drafts
from specstep.runtime.inductor.torch_session import TorchSession


def lines(drafter: str, tokenizer: object = None, **options: object) -> list[str]:
    source = Source("Llama", tiny_model("Llama"), tokenizer)
    given = {"dtype": "float32", "max_seq_len": 256, "max_batch": 3, "drafter": drafter} | options
    said: list[str] = []
    try_drafts(source, assemble(source, make_config(given)), "cpu", said.append)
    return said


@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer()])
def test_a_perfect_drafter_fills_every_step(tokenizer, tmp_path):
    same = save_model(tmp_path / "same")
    assert lines(str(same), tokenizer, nodes=3) == ["drafts: 4.0 tokens per step over 8 steps"]


def test_a_drafter_that_is_never_right_is_warned_of(tmp_path):
    model = tiny_model("Llama")
    model.lm_head.weight.data = model.lm_head.weight.data.roll(1, 0)
    model.save_pretrained(tmp_path / "shuffled")
    told, warning = lines(str(tmp_path / "shuffled"), nodes=3)
    assert told == "drafts: 1.0 tokens per step over 24 steps"
    assert warning.startswith("warning: no draft was accepted") and "feature layers that are one off" in warning


@pytest.mark.parametrize("drafter", ["none", "ngram", "ngram,ngram"])
def test_drafts_of_history_are_not_tried(drafter):
    assert lines(drafter) == []


def test_rows_too_short_for_all_steps_are_enough(tmp_path):
    (told,) = lines(str(save_model(tmp_path / "same")), max_seq_len=8, nodes=3)
    assert "over " in told and not told.endswith("8 steps")


def saying(chat_template: str | None) -> object:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


class Wordless:
    """A tokenizer that knows nothing of the question."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [
        (saying("{{ raise_exception('only the system may speak') }}"), list(QUESTION.encode())),
        (saying("{{ messages[0]['content'][0] + 1 }}"), list(QUESTION.encode())),
        (saying("{% if false %}nothing{% endif %}"), list(QUESTION.encode())),
        (Wordless(), list(range(16))),
    ],
    ids=["refuses", "is broken", "is silent", "no token"],
)
def test_a_template_that_refuses_leaves_the_plain_text(tokenizer, prompt, monkeypatch, tmp_path):
    asked = []
    admit = TorchSession.admit
    monkeypatch.setattr(TorchSession, "admit", lambda self, ids, *rest: asked.append(ids) or admit(self, ids, *rest))
    assert len(lines(str(save_model(tmp_path / "same")), tokenizer)) == 1
    assert [len(ids) for ids in asked] == [len(prompt)] and len(set(asked[0])) == len(set(prompt))


@pytest.mark.parametrize("nodes", [1, 7])
def test_the_trial_takes_no_more_memory_than_its_steps_need(nodes, monkeypatch, tmp_path):
    same, made = save_model(tmp_path / "same"), []
    start = TorchSession.__init__
    monkeypatch.setattr(TorchSession, "__init__", lambda self, *given: made.append(given[0]) or start(self, *given))
    (told,) = lines(str(same), max_seq_len=512, nodes=nodes)
    assert told == f"drafts: {1 + nodes:.1f} tokens per step over 8 steps"
    most = 16 + 24 * (1 + nodes) + made[0].scratch + 2 * 64
    assert {tensor.shape[2] for tensor in made[0].caches} == {made[0].capacity} and made[0].capacity <= most
    assert {tensor.shape for tensor in made[0].state if tensor.name == "history"} == {(1, made[0].capacity)}


def test_a_build_reports_it_ahead_of_the_compile(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inductor, "lower", full)
    said: list[str] = []
    with pytest.raises((specstep.BuildError, OSError), match="No space left"):
        specstep.build(
            str(save_model(tmp_path / "model")),
            tmp_path / "engine",
            drafter=str(tmp_path / "model"),
            max_seq_len=64,
            progress=said.append,
        )
    assert said[-1].startswith("drafts: ")

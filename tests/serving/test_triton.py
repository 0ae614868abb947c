"""The model of Triton Inference Server without one: its requests, its responses, and what is written for it."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_session import POISON, FakeSession, alone
from models import tiny_tokenizer
from served import PATIENCE, is_idle, until
from specstep.cli import main
from specstep.errors import InputError
from specstep.runtime.engine import Engine
from specstep.runtime.text import EngineTokenizer
from specstep.serving.triton.model import Model
from specstep.serving.triton.tensors import INPUTS, OUTPUTS, read

TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})


class Sender:
    """The sender of one request: what was sent, and whether the client has gone away."""

    def __init__(self):
        self.sent, self.cancelled, self.final = [], False, threading.Event()

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        assert not self.final.is_set()
        if response is not None:
            self.sent.append(response)
        if flags:
            self.final.set()

    def done(self):
        """All responses, the error last."""
        assert self.final.wait(PATIENCE)
        return self.sent


class Fault:
    """An error of Triton."""

    CANCELLED, UNAVAILABLE, INVALID_ARG, INTERNAL = "cancelled", "unavailable", "invalid", "internal"

    def __init__(self, message, code):
        self.message, self.code = message, code


def response(tensors, error=None):
    return SimpleNamespace(error=error, outputs=dict(tensors))


UTILS = SimpleNamespace(
    Tensor=lambda name, values: (name, values),
    InferenceResponse=response,
    TritonError=Fault,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
)


def array(value):
    if isinstance(value, str):
        return np.array([value.encode()], dtype=object)
    return np.array([value] if not isinstance(value, list) else value, bool if isinstance(value, bool) else np.int32)


@pytest.fixture
def model():
    """A slow engine of two rows, where one more may wait."""
    made = Model()
    made.utils = UTILS
    made.start(Engine(FakeSession(2, pause=0.01), TEXT), 1)
    yield made
    made.finalize()


def ask(model, **inputs):
    sender = Sender()
    tensors = {name: SimpleNamespace(as_numpy=lambda value=value: array(value)) for name, value in inputs.items()}
    model.execute([SimpleNamespace(inputs=tensors, get_response_sender=lambda: sender)])
    return sender


def tokens_of(sent, choice=0):
    told = [one.outputs for one in sent if one.outputs["choice"] == [choice]]
    return [token for outputs in told for token in outputs["token_ids"].tolist()]


def test_an_answer_comes_in_pieces(model):
    sent = ask(model, token_ids=[5, 6], max_new_tokens=20).done()
    assert tokens_of(sent) == alone([5, 6], 22) and len(sent) > 1
    assert all(set(one.outputs) == set(OUTPUTS) and one.error is None for one in sent)
    last = sent[-1].outputs
    assert (last["prompt_tokens"], last["completion_tokens"]) == ([2], [20])
    assert [one.outputs["finish_reason"][0] for one in sent] == [b""] * (len(sent) - 1) + [b"length"]
    text = b"".join(one.outputs["text"][0] for one in sent)
    assert text.decode() == TEXT.decode(alone([5, 6], 22))


def test_requests_share_the_rows_and_each_gets_its_own(model):
    asked = [ask(model, token_ids=[5 + at], max_new_tokens=30) for at in range(3)]
    assert [tokens_of(sender.done()) for sender in asked] == [alone([5 + at], 31) for at in range(3)]


def test_a_request_past_the_queue_is_told_so(model):
    asked = [ask(model, token_ids=[5], max_new_tokens=60) for _ in range(4)]
    faults = [sender.done()[-1].error for sender in asked]
    assert sorted(fault.code for fault in faults if fault) == ["unavailable"]
    assert ask(model, token_ids=[5], max_new_tokens=2).done()[-1].error is None


def test_a_client_that_goes_away_frees_its_row(model):
    sender = ask(model, token_ids=[5], max_new_tokens=90)
    until(lambda: sender.sent)
    sender.cancelled = True
    assert sender.done()[-1].error.code == "cancelled"
    until(lambda: is_idle(model._engine))
    assert len(tokens_of(sender.sent[:-1])) < 90 and model._taken == 0


def test_choices_are_told_apart(model):
    sampling = json.dumps({"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1})
    sent = ask(model, token_ids=[5], max_new_tokens=8, sampling=sampling).done()
    engine = model._engine
    expected = engine.generate([5], 8, sampling=json.loads(sampling))
    assert [tokens_of(sent, choice) for choice in (0, 1)] == [each.token_ids for each in expected.choices]
    first = [json.loads(one.outputs["logprobs"][0]) for one in sent if one.outputs["choice"] == [0]]
    assert [each[0] for piece in first for each in piece] == expected.token_ids


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "inputs: expected one of prompt, token_ids, messages, got none"),
        ({"prompt": "a", "token_ids": [1]}, "got prompt and token_ids"),
        ({"token_ids": [1], "max_new_tokens": [1, 2]}, "max_new_tokens: expected one element"),
        ({"token_ids": [1], "max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1"),
        ({"token_ids": [1], "sampling": "{"}, "sampling: expected JSON"),
        ({"token_ids": [1], "sampling": "[1]"}, "sampling: expected JSON of the form"),
        ({"token_ids": [1], "sampling": '{"temperature": -1}'}, "temperature: expected 0 or"),
        ({"messages": '{"role": "user"}'}, "messages: expected JSON of the form"),
        ({"token_ids": [10**6]}, "token_ids: expected integers"),
    ],
)
def test_what_is_wrong_is_told(model, inputs, says):
    [only] = ask(model, **inputs).done()
    assert only.error.code == "invalid" and says in only.error.message


def test_bytes_that_are_no_text():
    with pytest.raises(InputError, match="prompt: expected UTF-8"):
        read(None, {"prompt": np.array([b"\xff"], dtype=object)})


def test_a_failure_is_its_own_request_s(model):
    other = ask(model, token_ids=[5], max_new_tokens=30)
    fault = ask(model, token_ids=[POISON, 5], max_new_tokens=3).done()[-1].error
    assert fault.code == "internal" and "its log says why" in fault.message
    assert tokens_of(other.done()) == alone([5], 31)


def test_the_end_is_told_to_those_who_wait():
    model = Model()
    model.utils = UTILS
    model.start(Engine(FakeSession(1, pause=0.01), TEXT), 5)
    asked = [ask(model, token_ids=[5], max_new_tokens=90) for _ in range(2)]
    until(lambda: asked[0].sent)
    model.finalize()
    assert [sender.done()[-1].error.code for sender in asked] == ["unavailable"] * 2


def export(folder, engine, *more):
    return main(["export-triton", str(engine), "-o", str(folder / "models"), *more])


def test_a_repository_is_written_whole(tmp_path, engine_folder):
    assert export(tmp_path, engine_folder, "--name", "smol", "--instances", "2", "--max-queue", "7") == 0
    folder = tmp_path / "models" / "smol"
    config = (folder / "config.pbtxt").read_text()
    assert "count: 2 kind: KIND_CPU" in config and 'string_value: "7"' in config and "decoupled: true" in config
    assert all(f'name: "{name}"' in config and field.meaning in config for name, field in (INPUTS | OUTPUTS).items())
    copied = {path.name: path.read_bytes() for path in (folder / "1" / "engine").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in engine_folder.iterdir()}
    assert "specstep.serving.triton" in (folder / "1" / "model.py").read_text()
    assert export(tmp_path, engine_folder, "--name", "smol", "--link") == 0  # in its place
    assert (folder / "1" / "engine").resolve() == engine_folder.resolve()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smol"]


@pytest.mark.parametrize("arguments", [("--name", "a/b"), ("--instances", "0"), ("--max-queue", "-1")])
def test_what_cannot_be_written_is_one_line(tmp_path, capsys, arguments):
    assert export(tmp_path, tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specstep: {arguments[0][2:]}: expected") and len(error.splitlines()) == 1


def test_nothing_else_is_replaced(tmp_path, capsys):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert export(tmp_path, tmp_path, "--name", "mine") == 2
    assert "expected a new model, or one that this command wrote" in capsys.readouterr().err
    assert export(tmp_path, tmp_path, "--name", "new") == 2  # no engine
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]

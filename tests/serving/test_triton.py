"""The model of Triton Inference Server without one: its requests, its responses, and what is written for it."""

import json
import runpy
import shutil
import subprocess
import sys
import threading
from unittest.mock import patch

import numpy as np
import pytest
from fake_session import POISON, FakeSession, alone
from fake_triton import LOGGED, UTILS, InAThread, ask, started, tokens_of
from models import tiny_tokenizer
from served import is_idle, until
from specstep.cli import main
from specstep.errors import EngineError, InputError
from specstep.runtime.engine import Engine
from specstep.runtime.engine_file import file_entry
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.served import Served
from specstep.serving.triton import model as triton_model
from specstep.serving.triton import worker as triton_worker
from specstep.serving.triton.model import TritonModel
from specstep.serving.triton.tensors import INPUTS, OUTPUTS, read

TEXT = EngineTokenizer(tiny_tokenizer().backend_tokenizer, None, {})


def slow(rows):
    return Engine(FakeSession(rows, pause=0.01), TEXT)


@pytest.fixture
def engine():
    return slow(2)


@pytest.fixture
def model(engine):
    """A slow engine of two rows, where one more may wait."""
    made, _ = started(lambda: engine, 1)
    yield made
    made.finalize()


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


def test_one_request_leaves_places_to_others(model):
    fault = ask(model, token_ids=[5], sampling=json.dumps({"n": 3, "temperature": 1.0})).done()[-1].error
    assert fault.code == "invalid" and "n: expected at most 2 choices in one call, got 3" in fault.message
    assert ask(model, token_ids=[5], max_new_tokens=2).done()[-1].error is None


def test_a_client_that_goes_away_frees_its_row(model, engine):
    sender = ask(model, token_ids=[5], max_new_tokens=90)
    until(lambda: sender.sent)
    sender.cancelled = True
    assert sender.done()[-1].error.code == "cancelled"
    until(lambda: is_idle(engine))
    assert len(tokens_of(sender.sent[:-1])) < 90
    assert all(ask(model, token_ids=[5], max_new_tokens=2).done()[-1].error is None for _ in range(4))


def test_choices_are_told_apart(model, engine):
    sampling = json.dumps({"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1})
    sent = ask(model, token_ids=[5], max_new_tokens=8, sampling=sampling).done()
    expected = engine.generate([5], 8, sampling=json.loads(sampling))
    assert [tokens_of(sent, choice) for choice in (0, 1)] == [each.token_ids for each in expected.choices]
    first = [json.loads(one.outputs["logprobs"][0]) for one in sent if one.outputs["choice"] == [0]]
    assert [each[0] for piece in first for each in piece] == expected.token_ids


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "inputs: expected one of prompt, token_ids, messages, chat_request, got none"),
        ({"prompt": "a", "token_ids": [1]}, "got prompt and token_ids"),
        ({"token_ids": [1], "max_new_tokens": [1, 2]}, "max_new_tokens: expected one element"),
        ({"token_ids": [1], "max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1"),
        ({"token_ids": [1], "sampling": "{"}, "sampling: expected JSON"),
        ({"token_ids": [1], "sampling": "[1]"}, "sampling: expected JSON of the form"),
        ({"token_ids": [1], "sampling": '{"temperature": -1}'}, "temperature: expected 0 or"),
        ({"messages": '{"role": "user"}'}, "messages: expected JSON of the form"),
        ({"token_ids": [10**6]}, "token_ids: expected integers"),
        ({"prompt": "a" * 2**20}, "prompt: expected at most"),
        ({"messages": json.dumps([{"role": "user", "content": "a" * 2**20}])}, "messages: expected at most"),
        (
            {"messages": '[{"role": "user", "content": "a"}]', "chat_template_kwargs": json.dumps({"x": "a" * 2**20})},
            "chat_template_kwargs: expected at most",
        ),
    ],
)
def test_what_is_wrong_is_told(model, inputs, says):
    [only] = ask(model, **inputs).done()
    assert only.error.code == "invalid" and says in only.error.message


def test_what_no_row_can_hold_is_not_tokenised(engine, monkeypatch):
    monkeypatch.setattr(engine.text, "encode", None)
    served = Served("engine", engine, 1, learning=False)
    with pytest.raises(InputError, match=r"prompt: expected at most .* got 4194304 characters"):
        read(served, {"prompt": np.array([b"a" * 2**22], dtype=object)})


def test_bodies_that_are_read_have_places(model, monkeypatch):
    """However many come at once, no more are held than may run or wait."""
    go, begun = threading.Event(), []

    def slow(served, given):
        begun.append(given)
        go.wait()
        return read(served, given)

    monkeypatch.setattr(triton_worker, "read", slow)
    senders = [ask(model, token_ids=[5], max_new_tokens=2) for _ in range(20)]
    until(lambda: sum(sender.final.is_set() for sender in senders) == 17)
    refused = [sender for sender in senders if sender.final.is_set()]
    assert {sender.done()[-1].error.code for sender in refused} == {"unavailable"}
    go.set()
    assert all(sender.done()[-1].error is None for sender in senders if sender not in refused)
    assert len(begun) == 3


def test_bytes_that_are_no_text():
    with pytest.raises(InputError, match="prompt: expected UTF-8"):
        read(None, {"prompt": np.array([b"\xff"], dtype=object)})


def test_a_failure_is_its_own_request_s(model):
    other = ask(model, token_ids=[5], max_new_tokens=30)
    fault = ask(model, token_ids=[POISON, 5], max_new_tokens=3).done()[-1].error
    assert fault.code == "internal" and "its log says why" in fault.message
    assert tokens_of(other.done()) == alone([5], 31)


def test_the_end_is_told_to_those_who_wait():
    model, _ = started(lambda: slow(1), 5)
    asked = [ask(model, token_ids=[5], max_new_tokens=90) for _ in range(2)]
    until(lambda: asked[0].sent)
    model.finalize()
    assert [sender.done()[-1].error.code for sender in asked] == ["unavailable"] * 2


def test_a_process_that_dies_loses_its_own_requests_and_another_one_takes_its_place(monkeypatch):
    monkeypatch.setattr(triton_model, "PAUSE", 0.01)
    engines = [slow(1), EngineError("engine: expected one, got none"), slow(1)]

    def make():
        engine = engines.pop(0)
        if isinstance(engine, Exception):
            raise engine
        return engine

    model, begun = started(make, 5)
    asked = [ask(model, token_ids=[5], max_new_tokens=90) for _ in range(2)]
    until(lambda: asked[0].sent)
    begun[0].die()
    faults = [sender.done()[-1].error for sender in asked]
    assert {fault.code for fault in faults} == {"unavailable"} and "another one" in faults[0].message
    until(lambda: len(begun) == 3)  # the second cannot load its engine
    assert tokens_of(ask(model, token_ids=[5], max_new_tokens=9).done()) == alone([5], 10)
    model.finalize()
    assert any("ended with status" in line for line in LOGGED) and any("got none" in line for line in LOGGED)


def test_an_engine_that_breaks_ends_its_process_and_another_one_takes_its_place(monkeypatch):
    monkeypatch.setattr(triton_worker, "LOOK", 0.01)
    first = slow(1)
    first.session._reset = lambda row: (_ for _ in ()).throw(RuntimeError("the device is gone"))
    engines = [first, slow(1)]
    model, begun = started(lambda: engines.pop(0), 5)
    ask(model, token_ids=[5], max_new_tokens=3).done()
    until(lambda: len(begun) == 2)
    assert tokens_of(ask(model, token_ids=[5], max_new_tokens=9).done()) == alone([5], 10)
    model.finalize()


def test_nothing_ends_the_thread_that_hands_on_what_is_said(monkeypatch):
    """Not what it hears, nor what it must do: the requests of the process end, and another one takes its place."""
    monkeypatch.setattr(triton_model, "PAUSE", 0.01)
    engines = [slow(1), slow(1), slow(1)]
    model, begun = started(lambda: engines.pop(0), 5)
    waiting = ask(model, token_ids=[5], max_new_tokens=90)
    until(lambda: waiting.sent)
    begun[0]._theirs.send((1, 2, 3))  # no message at all
    assert waiting.done()[-1].error.code == "unavailable"
    assert tokens_of(ask(model, token_ids=[5], max_new_tokens=9).done()) == alone([5], 10)
    failing = [MemoryError("none left")]
    monkeypatch.setattr(model, "_look", lambda: (_ for _ in ()).throw(failing.pop()) if failing else None)
    until(lambda: len(begun) == 3)
    assert tokens_of(ask(model, token_ids=[5], max_new_tokens=9).done()) == alone([5], 10)
    model.finalize()


def initialize(folder, tool_format=None, **arguments):
    model = TritonModel()
    model.utils = UTILS
    parameters = {"max_queue": "7"} | ({} if tool_format is None else {"tool_format": tool_format})
    config = json.dumps({"parameters": {name: {"string_value": value} for name, value in parameters.items()}})
    given = {"model_instance_kind": "CPU", "model_config": config, "model_version": "1"}
    model.initialize(given | {"model_repository": str(folder)} | arguments)


def test_an_engine_that_cannot_be_loaded_is_told(tmp_path):
    with pytest.raises(EngineError, match=r"manifest\.json"):
        initialize(tmp_path)


def test_an_instance_has_the_gpu_that_triton_gives_it(tmp_path, monkeypatch):
    begun = []

    def process(*arguments):
        begun.append(arguments)
        return InAThread(lambda: slow(1), 1)

    monkeypatch.setattr(triton_model, "EngineProcess", process)
    for given in ("llama3", "", None):  # earlier versions wrote none
        initialize(tmp_path, given, model_instance_kind="GPU", model_instance_device_id="3")
        engine, max_queue, tool_format, environment = begun.pop()
        assert (engine, max_queue, tool_format) == (tmp_path / "1" / "engine", 7, given or None)
        assert environment["CUDA_VISIBLE_DEVICES"] == "3"


def export(folder, engine, *more):
    return main(["export-triton", str(engine), "-o", str(folder / "models"), *more])


def run_file(file):
    """What Triton does with a model's file -> its names."""
    with patch.dict(sys.modules, triton_python_backend_utils=UTILS):
        return runpy.run_path(str(file))


def test_a_repository_is_written_whole(tmp_path, engine_folder):
    options = ["--name", "smol", "--instances", "2", "--max-queue", "7", "--tool-format", "glm-4.5"]
    assert export(tmp_path, engine_folder, *options) == 0
    folder = tmp_path / "models" / "smol"
    config = (folder / "config.pbtxt").read_text()
    assert "count: 2 kind: KIND_CPU" in config and 'string_value: "7"' in config and "decoupled: true" in config
    assert 'key: "tool_format" value { string_value: "glm-4.5" }' in config
    assert all(f'name: "{name}"' in config and field.meaning in config for name, field in (INPUTS | OUTPUTS).items())
    copied = {path.name: path.read_bytes() for path in (folder / "1" / "engine").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in engine_folder.iterdir()}
    assert issubclass(run_file(folder / "1" / "model.py")["TritonPythonModel"], TritonModel)
    assert export(tmp_path, engine_folder, "--name", "smol", "--link") == 0  # in its place
    assert (folder / "1" / "engine").resolve() == engine_folder.resolve()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["smol"]


@pytest.mark.parametrize(
    "arguments", [("--name", "a/b"), ("--instances", "0"), ("--max-queue", "-1"), ("--tool-format", "x")]
)
def test_what_cannot_be_written_is_one_line(tmp_path, capsys, arguments):
    assert export(tmp_path, tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specstep: {arguments[0][2:]}: expected") and len(error.splitlines()) == 1


def test_files_outside_of_an_engine_are_not_copied(tmp_path, engine_folder, capsys):
    engine = tmp_path / "engine"
    shutil.copytree(engine_folder, engine)
    (tmp_path / "secret").write_text("secret")
    manifest = json.loads((engine / "manifest.json").read_text())
    for name in ("../secret", str(tmp_path / "secret"), "..", "a/../../secret", ""):
        files = manifest["files"] | {name: file_entry(tmp_path / "secret")}
        (engine / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
        assert export(tmp_path, engine, "--name", "smol") == 2
        error = capsys.readouterr().err
        assert "manifest.files: name: expected a name of letters" in error and len(error.splitlines()) == 1
    assert not list(tmp_path.glob("models/**/secret"))


def test_nothing_else_is_replaced(tmp_path, capsys):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert export(tmp_path, tmp_path, "--name", "mine") == 2
    assert "expected a new model, or one that this command wrote" in capsys.readouterr().err
    assert export(tmp_path, tmp_path, "--name", "new") == 2  # no engine
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["mine"]


def test_the_worker_needs_no_http_server():
    """Triton has one; the extra `serve` need not be there."""
    program = "import sys; sys.modules.update(dict.fromkeys({!r})); import specstep.serving.{}"
    server, fields = ["fastapi", "starlette", "uvicorn"], ["pydantic"]
    without = {"triton.worker": server + fields, "triton.model": server + fields, "prepare": server}
    for name, packages in without.items():
        subprocess.run([sys.executable, "-c", program.format(packages, name)], check=True)

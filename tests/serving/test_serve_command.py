"""`specstep serve`: its options, and the server that it starts."""

import contextlib
import socket
from pathlib import Path

import httpx2 as httpx
import pytest
from served import PATIENCE
from specstep import model_engines
from specstep.cli import main
from specstep.commands import serve as command
from specstep.errors import EXIT_BROKEN
from specstep.runtime import load as engines
from specstep.serving import kv_zmq, server
from specstep.serving.server import is_local, listen

LEARNING = {"learning": True, "learned": None}


@pytest.fixture
def served(monkeypatch):
    """What the command would serve, in place of a server."""
    calls = []
    monkeypatch.setattr(server, "serve", lambda *given: calls.append(given))
    monkeypatch.setattr(engines, "load", FakeEngine)
    monkeypatch.setattr(model_engines, "engine_of", lambda engine, *_: Path(engine))
    monkeypatch.delenv(command.ENVIRONMENT, raising=False)
    return calls


class FakeEngine:
    closed = 0

    def __init__(self, directory, **options):
        self.directory, self.options = directory, options
        self.kv_events = directory.name if options["kv_events"] else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        FakeEngine.closed += 1


def test_what_is_learned(served):
    keys = ["--api-key", "one", "--api-key", "two"]
    for more, counts, learns in (
        (keys[:2], True, True),
        (keys, True, False),
        ([*keys, "--share-prefixes"], True, True),
        (["--no-learning"], False, True),
    ):
        assert main(["serve", "engine", "--port", "0", *more]) == 0
        engines, _, options, _ = served[-1]
        assert (engines["engine"].options["learning"], options.learning) == (counts, learns)
    assert main(["serve", "engine", "other", "--port", "0", "--learned", "file"]) == 2
    assert main(["serve", "engine", "--port", "0", *keys, "--learned", "file"]) == 2


def test_directories_become_models(served, tmp_path):
    FakeEngine.closed = 0
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["serve", str(first), f"other={second}/", "--port", "0", "--max-queue", "3", "--drain", "7"]) == 0
    [(loaded, bound, options, drain)] = served
    assert {name: engine.directory for name, engine in loaded.items()} == {"first": first, "other": second}
    assert (options.max_queue, options.api_keys, drain, FakeEngine.closed) == (3, (), 7, 2)
    assert bound.fileno() == -1, "the socket is closed"
    how = {"prefix_cache_bytes": 2**28, "prefill_per_step": 64, "nodes": "auto"} | LEARNING
    assert loaded["first"].options.items() >= how.items()
    assert options.stream_interval_ms == 40
    assert not loaded["first"].options["kv_events"] and not options.kv_events
    assert main(["serve", str(first), "--port", "0", "--kv-events"]) == 0
    assert served[1][0]["first"].options["kv_events"] and served.pop()[2].kv_events
    more = ["--prefix-cache", "0", "--prefill-per-step", "32", "--nodes", "3", "--stream-interval-ms", "5"]
    assert main(["serve", str(first), "--port", "0", *more]) == 0
    assert served[1][2].stream_interval_ms == 5
    how = {"prefix_cache_bytes": 0, "prefill_per_step": 32, "nodes": 3} | LEARNING
    assert served[1][0]["first"].options.items() >= how.items()


def test_the_server_is_alive_and_not_ready_while_engines_are_loaded(served, monkeypatch):
    bound, told, real = [], {}, server.listen
    monkeypatch.setattr(server, "listen", lambda *given: bound.append(real(*given)) or bound[0])

    def load(directory, **options):
        url = f"http://127.0.0.1:{bound[0].getsockname()[1]}"
        paths = ("/livez", "/readyz", "/health", "/v1/models")
        told.update({path: httpx.get(url + path, timeout=PATIENCE) for path in paths})
        return FakeEngine(directory, **options)

    monkeypatch.setattr(engines, "load", load)
    assert main(["serve", "engine", "--port", "0"]) == 0
    assert {path: answer.status_code for path, answer in told.items()} == {
        "/livez": 200, "/readyz": 503, "/health": 503, "/v1/models": 503
    }  # fmt: skip
    assert told["/v1/models"].headers["Retry-After"] == "5"
    assert "being loaded" in told["/v1/models"].json()["error"]["message"]


def test_kv_events_are_published(served, monkeypatch):
    published = []
    monkeypatch.setattr(kv_zmq, "published", lambda *given: published.append(given) or contextlib.nullcontext())
    assert main(["serve", "x", "--port", "0", "--kv-events-zmq", "tcp://*:5557", "--kv-events-topic", "kv@a@x"]) == 0
    assert published == [("x", "tcp://*:5557", "kv@a@x")] and served[0][2].kv_events


def test_an_engine_that_breaks_is_one_line_and_a_status(served, monkeypatch, capsys):
    monkeypatch.setattr(server, "serve", lambda *given: "engine: x: expected one that runs, got an error; start again")
    assert main(["serve", "x", "--port", "0"]) == EXIT_BROKEN == 70
    assert capsys.readouterr().err == "specstep: engine: x: expected one that runs, got an error; start again\n"


def test_keys_come_from_options_and_environment(served, monkeypatch, capsys):
    monkeypatch.setenv(command.ENVIRONMENT, "one, two,")
    assert main(["serve", "x", "--port", "0", "--api-key", "three", "--host", "0.0.0.0"]) == 0
    assert served[0][2].api_keys == ("three", "one", "two")
    assert "warning" not in capsys.readouterr().err


def test_an_open_server_for_everybody_is_warned_of(served, capsys):
    assert main(["serve", "x", "--port", "0", "--host", "0.0.0.0"]) == 0
    assert "warning: 0.0.0.0 without an API key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["a/x", "b/x"], "engines"), (["=x"], "engines"), (["x", "--api-key", "two words"], "api-key"),
        (["x", "--max-queue", "-1"], "max-queue"), (["x", "--drain", "-1"], "drain"),
        (["x", "--prefix-cache", "-1"], "prefix-cache"), (["x", "--stream-interval-ms", "1001"], "stream-interval-ms"),
        (["x", "--max-connections", "0"], "max-connections"),
        (["x", "--api-key", "one", "--api-key", "two", "--kv-events"], "kv-events"),
        (["x", "--api-key", "one", "--api-key", "two", "--kv-events-zmq", "tcp://*:1"], "kv-events"),
        (["x", "y", "--kv-events-zmq", "tcp://*:1"], "kv-events-zmq"),
        (["x", "--port", "70000"], "host"), (["x", "--host", "no.such.host.invalid"], "host"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(served, capsys, arguments, field):
    assert main(["serve", "--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specstep: {field}") and len(error.splitlines()) == 1 and not served


def test_a_port_in_use_is_an_error_before_anything_is_loaded(served, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "x", "--port", str(other.getsockname()[1])]) == 2
    assert "expected an address that is free" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "; an engine directory is taken, too" in capsys.readouterr().err


def test_addresses():
    assert is_local("127.0.0.1") and is_local("::1") and is_local("localhost") and not is_local("0.0.0.0")
    assert not is_local("localhost.example.com") and not is_local("127.example.com") and not is_local("")
    with listen("localhost", 0) as bound:
        assert bound.getsockname()[1] > 0

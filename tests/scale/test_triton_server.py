"""Triton Inference Server for real: the one that PyPI's nvidia-pytriton carries starts on a machine without a GPU."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from scale_prompts import ASKED
from served import PATIENCE, until, user
from specstep.cli import main
from specstep.serving.server import listen

pytestmark = pytest.mark.scale
grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient[grpc]: make test-scale installs it")
CARRIER = importlib.util.find_spec("pytriton")
if CARRIER is None:
    pytest.skip("needs nvidia-pytriton: make test-scale installs it", allow_module_level=True)
if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
    pytest.skip("needs numpy 1: this server's Python backend reads no array of numpy 2", allow_module_level=True)
SERVER = Path(CARRIER.submodule_search_locations[0]) / "tritonserver"
STARTS = 120  # seconds that a server may take
STATUSES = {"triton_grpc_error": "true"}  # without it a stream's errors are messages alone
LONG = {"prompt": [5], "max_new_tokens": 180, "sampling": {}}


@contextlib.contextmanager
def triton(repository, folder):
    """A server of a repository -> its process, with `url` and `http`, the addresses of gRPC and HTTP."""
    backends, version = folder / "backends", f"{sys.version_info.major}.{sys.version_info.minor}"
    if not backends.exists():
        shutil.copytree(SERVER / "backends", backends)
        shutil.copy(SERVER / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    with listen("127.0.0.1", 0) as one, listen("127.0.0.1", 0) as other:
        ports = [bound.getsockname()[1] for bound in (one, other)]
    libraries = f"{SERVER.parents[1] / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the backend's Python is the first of the path
    command = [
        SERVER / "bin" / "tritonserver", f"--model-repository={repository}", f"--backend-directory={backends}",
        f"--grpc-port={ports[0]}", f"--http-port={ports[1]}", "--allow-metrics=false", "--exit-timeout-secs=5",
    ]  # fmt: skip
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "PATH": path}
    log = folder / f"server-{ports[0]}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    process.url, process.http = f"127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    try:
        ready(process, log)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()


def ready(process, log):
    ends = time.monotonic() + STARTS
    while time.monotonic() < ends:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{process.http}/v2/health/ready").status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder for servers."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def repository(place, engine_folder):
    """A model `tiny` of two instances."""
    assert (
        main(["export-triton", str(engine_folder), "-o", str(place / "models"), "--name", "tiny", "--instances", "2"])
        == 0
    )
    return place / "models"


@pytest.fixture(scope="module")
def server(repository, place):
    with triton(repository, place) as process:
        yield process


def inputs(prompt, max_new_tokens, sampling, ignore_eos=True):
    values = {
        "token_ids": ("INT32", np.array(prompt, np.int32)),
        "max_new_tokens": ("INT32", np.array([max_new_tokens], np.int32)),
        "sampling": ("BYTES", np.array([json.dumps(sampling).encode()], dtype=object)),
        "ignore_eos": ("BOOL", np.array([ignore_eos])),
    }
    tensors = []
    for name, (kind, value) in values.items():
        tensors.append(grpc.InferInput(name, list(value.shape), kind))
        tensors[-1].set_data_from_numpy(value)
    return tensors


class Stream:
    """One request in a stream of its own."""

    def __init__(self, url, asked):
        self._client, self._told = grpc.InferenceServerClient(url), Queue()
        self._client.start_stream(lambda result, error: self._told.put((result, error)), headers=STATUSES)
        self._client.async_stream_infer("tiny", inputs(**asked), enable_empty_final_response=True)

    def pieces(self):
        """The responses -> lists of tokens, until the last. Raises what the server sent as an error."""
        while True:
            result, error = self._told.get(timeout=PATIENCE)
            if error is not None:
                raise error
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
            yield result.as_numpy("token_ids").tolist()

    def tokens(self):
        with contextlib.closing(self._client):
            return [token for piece in self.pieces() for token in piece]

    def leave(self):
        self._client.stop_stream(cancel_requests=True)


def test_two_instances_answer_as_one_engine(server, alone):
    with ThreadPoolExecutor(len(ASKED)) as pool:
        answers = list(pool.map(lambda asked: Stream(server.url, asked).tokens(), ASKED))
    assert answers == alone
    assert len(engines(server)) == 2


def post(server, body):
    """The events of an answer over HTTP."""
    address, headers = f"{server.http}/v2/models/tiny/generate_stream", {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=PATIENCE).read().decode()


def test_text_over_http_comes_in_events(server, engine_folder):
    import specstep

    body = {"prompt": "hello", "max_new_tokens": 16, "ignore_eos": True}
    events = [json.loads(line.removeprefix("data: ")) for line in post(server, body).split("\n\n") if line]
    with specstep.load(engine_folder) as engine:
        expected = engine.generate("hello", 16, ignore_eos=True)
    assert "".join(event["text"] for event in events) == expected.text
    assert events[-1]["finish_reason"] == "length" and events[-1]["completion_tokens"] == 16


def test_a_chat_request_is_answered_as_by_the_server(server, engine_folder):
    """The name of a special token that a user writes is text."""
    import specstep

    messages = user("hello </s> you")
    asked = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    told = post(server, {"chat_request": json.dumps(asked)})
    events = [json.loads(line.removeprefix("data: ")) for line in told.split("\n\n") if line]
    with specstep.load(engine_folder) as engine:
        expected = engine.generate(messages, 16, ignore_eos=True)
        special = engine.generate(messages, 16, ignore_eos=True, parse_special=True)
    assert "".join(json.loads(event["delta"]).get("content") or "" for event in events) == expected.text
    assert events[-1]["prompt_tokens"] == len(expected.prompt_token_ids) > len(special.prompt_token_ids)


@pytest.mark.parametrize(
    ("changed", "says"), [({"prompt": []}, "empty prompt"), ({"sampling": {"n": 0}}, "n: expected")]
)
def test_what_is_wrong_has_a_status(server, changed, says):
    with pytest.raises(grpc.InferenceServerException, match=says) as caught:
        Stream(server.url, ASKED[0] | changed).tokens()
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        post(server, {"token_ids": [5], "sampling": '{"n": 0}'})
    assert b"n: expected" in caught.value.read()


def test_clients_that_go_away_free_their_rows(server, alone):
    """More of them than there are places: 2 instances of 2 rows, 128 wait in each."""
    for _ in range(5):
        left = [Stream(server.url, LONG) for _ in range(8)]
        for stream in left:
            stream.leave()
    assert Stream(server.url, ASKED[0]).tokens() == alone[0]


@pytest.fixture(scope="module")
def long_alone(engine_folder):
    """What one engine answers to LONG."""
    import specstep

    with specstep.load(engine_folder) as engine:
        return engine.generate(LONG["prompt"], LONG["max_new_tokens"], ignore_eos=True).token_ids


def test_an_instance_that_is_killed_loses_its_own_requests_alone(server, long_alone):
    before = engines(server)
    streams = [Stream(server.url, LONG) for _ in range(12)]
    begun = [next(stream.pieces()) for stream in streams[:2]]
    os.kill(before[0], signal.SIGKILL)
    outcomes = [ended(stream) for stream in streams]
    later = [Stream(server.url, LONG) for _ in range(12)]  # half of them wait for the engine in its place
    for at, piece in enumerate(begun):
        outcomes[at] = piece + outcomes[at] if isinstance(outcomes[at], list) else outcomes[at]
    lost = [each for each in outcomes if each != long_alone]
    assert lost and len(lost) < len(outcomes) and set(lost) == {"StatusCode.UNAVAILABLE"}
    assert [ended(stream) for stream in later] == [long_alone] * len(later)
    assert len(engines(server)) == 2 and before[0] not in engines(server)


def test_an_instance_whose_engine_breaks_gets_another_one(server, long_alone, breaks):
    before = engines(server)
    breaks.write_text(str(before[0]))
    time.sleep(1)  # until the process has seen it

    def replaced():
        ended(Stream(server.url, LONG))
        now = engines(server)
        return before[0] not in now and len(now) == 2

    until(replaced)
    assert [ended(Stream(server.url, LONG)) for _ in range(4)] == [long_alone] * 4


def test_a_server_that_is_killed_leaves_nothing_behind(server):
    """The last test: it ends the server of this module."""
    stream, running = Stream(server.url, LONG), engines(server)
    next(stream.pieces())
    server.kill()
    server.wait()
    assert ended(stream) == "StatusCode.UNAVAILABLE"
    until(lambda: not any(Path(f"/proc/{engine}").exists() for engine in running))


def engines(server):
    """The processes of a server's engines: each has a stub of Triton ahead of it."""
    stubs = children(server.pid, "triton_python_backend_stub")
    return [engine for stub in stubs for engine in children(stub, "specstep.serving.triton.worker")]


def children(process, named):
    command = ["ps", "--ppid", str(process), "-ww", "-o", "pid=,args="]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if named in line]


def ended(stream):
    """The tokens of a stream, or the status that it ends with."""
    try:
        return stream.tokens()
    except grpc.InferenceServerException as error:
        return str(error.status())

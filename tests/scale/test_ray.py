"""Ray Serve for real: two replicas of a tiny engine on this machine."""

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
from scale_prompts import ASKED
from served import PATIENCE, until
from specstep.serving.server import listen

pytestmark = pytest.mark.scale
pytest.importorskip("ray.serve", reason="needs ray[serve]: make test-scale installs it")

REPLICAS, CLIENTS, CALLS = 2, 8, 12
LONG = {"prompt": [5, 40], "max_tokens": 180, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def address(engine_folder, tmp_path_factory):
    """The application with two replicas."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}.items():
            patch.setenv(name, value)
        import ray
        from ray import serve
        from specstep.serving.ray import Replicas, app

        with listen("127.0.0.1", 0) as bound:
            port = bound.getsockname()[1]
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, logging_level="warning")
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            asked = Replicas(engine=str(engine_folder), name="tiny", min_replicas=REPLICAS, cpus=0.5)
            serve.run(app(asked), name="specstep")
            until(lambda: len(replicas()) == REPLICAS)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def replicas():
    """The processes of the replicas."""
    lines = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ray::ServeReplica:specstep" in line]


def call(address, body):
    """The status of a call, or what broke it off, and its text."""
    try:
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as response:
            content = response.read().decode()
    except httpx.TransportError as error:
        return type(error).__name__, None
    if response.status_code != 200:
        return response.status_code, content
    if not body.get("stream"):
        return 200, json.loads(content)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    if events[-1] != "[DONE]":
        return "no end", None
    return 200, "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.fixture(scope="module")
def texts(engine_folder, alone):
    """What one engine answers to ASKED, and to LONG, as text."""
    import specstep

    with specstep.load(engine_folder) as engine:
        long = engine.generate(LONG["prompt"], LONG["max_tokens"], ignore_eos=True)
        return [engine.tokenizer.decode(tokens) for tokens in alone], long.text


@pytest.mark.parametrize("stream", [False, True])
def test_two_replicas_answer_as_one_engine(address, texts, stream):
    fixed = {"ignore_eos": True, "temperature": 0, "stream": stream}
    bodies = [fixed | {"prompt": one["prompt"], "max_tokens": one["max_new_tokens"]} | one["sampling"] for one in ASKED]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: call(address, body), bodies))
    assert answers == [(200, text) for text in texts[0]]


def test_a_balancer_may_ask_whether_the_proxy_is_well(address):
    assert httpx.get(f"{address}/-/healthz", timeout=PATIENCE).status_code == 200


def test_what_is_wrong_is_an_error_of_openai_s_form(address):
    got = httpx.post(f"{address}/v1/completions", json={"prompt": [5], "temperature": -1}, timeout=PATIENCE)
    assert got.status_code == 400 and got.json()["error"]["param"] == "temperature"


def test_a_prompt_that_was_served_is_not_prefilled_again(address):
    body = {"prompt": [5, 6, 7, 8] * 20, "max_tokens": 1, "temperature": 0}
    answers = [httpx.post(f"{address}/v1/completions", json=body, timeout=PATIENCE).json() for _ in range(REPLICAS + 1)]
    assert max(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers) >= 32


def test_what_serve_run_says_is_text(tmp_path):
    from specstep.serving.ray import Replicas

    asked = Replicas.model_validate({"engine": str(tmp_path), "max_replicas": "4", "api_keys": "one, two"})
    assert (asked.max_replicas, asked.api_keys) == (4, ("one", "two"))


def test_clients_that_go_away_free_their_rows(address):
    def left(_):
        body = LONG | {"stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE) as response:
            next(response.iter_bytes())

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(left, range(2 * CLIENTS)))
    until(lambda: all(running(address) == 0 for _ in range(8)))  # of either replica


def running(address):
    """Rows in use of the replica that answers."""
    page = httpx.get(f"{address}/metrics", timeout=PATIENCE).text
    return float(next(line.split()[-1] for line in page.splitlines() if line.startswith("specstep_running{")))


def test_a_replica_whose_engine_breaks_is_replaced(address, texts, breaks):
    broken = replicas()[0]
    breaks.write_text(str(broken))
    time.sleep(1)  # until the process has seen it
    outcomes = []

    def replaced():
        outcomes.append(call(address, LONG)[0])
        now = replicas()
        return broken not in now and len(now) == REPLICAS

    until(replaced)
    assert set(outcomes) <= {200, 500, 503} and outcomes.count(200) != len(outcomes)
    assert [call(address, LONG) for _ in range(4)] == [(200, texts[1])] * 4


def test_a_replica_that_is_killed_loses_its_own_requests_alone(address, texts):
    begun, killed = threading.Event(), replicas()[0]
    outcomes = []

    def client(number):
        for at in range(CALLS):
            stream = bool((number + at) % 2)
            outcomes.append((stream, *call(address, LONG | {"stream": stream})))
            if at == 1:
                begun.set()

    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, number) for number in range(CLIENTS)]
        assert begun.wait(PATIENCE)
        os.kill(killed, signal.SIGKILL)
        for each in running:
            each.result()
    lost = [(stream, status, text) for stream, status, text in outcomes if status != 200]
    assert all(text == texts[1] for _, status, text in outcomes if status == 200)
    assert 0 < len(lost) <= CLIENTS
    assert all(status == 500 or (stream and status == "RemoteProtocolError") for stream, status, _ in lost), lost
    until(lambda: len([pid for pid in replicas() if pid != killed]) == REPLICAS)
    assert call(address, LONG) == (200, texts[1])

"""What Prometheus reads: how full rows and caches are, under our names and under vLLM's."""

import httpx2 as httpx
import pytest
from fake_session import FakeSession
from prometheus_client.parser import text_string_to_metric_families
from served import PATIENCE, is_idle, post, running, until
from specstep.runtime.engine import Engine
from specstep.runtime.prefix_cache import BLOCK
from specstep.serving.app import create_app
from specstep.serving.vllm_metrics import NAMES

BLOCK_BYTES = BLOCK * 2 * 4  # of the fake session
PROMPT = [(7 * index + index * index) % 90 for index in range(70)]


@pytest.fixture
def fakes():
    """A server of two models of two rows; the first has a prefix cache of 8 blocks."""
    with (
        Engine(FakeSession(2), None, prefix_cache_bytes=8 * BLOCK_BYTES) as one,
        Engine(FakeSession(2), None) as other,
        running(create_app({"one": one, "other": other})) as url,
    ):
        yield one, url


def samples(url):
    """All samples of the page by name and model, as a reader of Prometheus' format has them."""
    families = text_string_to_metric_families(httpx.get(url + "/metrics", timeout=PATIENCE).text)
    return {
        (sample.name, sample.labels.get("model") or sample.labels.get("model_name")): (sample, family.type)
        for family in families
        for sample in family.samples
    }


def test_how_full_the_caches_are(fakes):
    """A row holds 100 tokens; what was served fills blocks, and frees its row."""
    engine, url = fakes
    assert engine.cache_use == (0, 200, 0, 8, 32)
    engine.session.pause = 0.05
    request = engine.request(PROMPT, 20)
    with engine.submit(request) as stream:
        next(iter(stream))
        found = samples(url)
        assert 0.35 <= found["specstep_cache_usage", "one"][0].value <= 0.45
        assert found["specstep_running", "one"][0].value == 1
        assert found["specstep_cache_usage", "other"][0].value == 0
    until(lambda: is_idle(engine))
    found = samples(url)
    assert found["specstep_cache_usage", "one"][0].value == 0
    assert found["specstep_prefix_cache_usage", "one"][0].value == engine.cache_use.blocks / 8 >= 2 / 8
    assert found["specstep_prefix_cache_usage", "other"][0].value == 0


def test_vllm_s_names_have_the_same_values(fakes):
    _, url = fakes
    for _ in range(2):
        post(url, "/v1/completions", model="one", prompt=PROMPT, max_tokens=5, temperature=0)
    found = samples(url)
    for ours, name in NAMES:
        mine = {key: each for key, each in found.items() if key[0].startswith(ours) and key[1] == "one"}
        assert mine
        for (sample, model), (value, kind) in mine.items():
            copy, copy_kind = found[sample.replace(ours, name), model]
            assert (copy.value, copy_kind) == (value.value, kind) and copy.labels["engine"] == "0"
    assert found["vllm:prefix_cache_hits_total", "one"][0].value == 63
    assert found["vllm:prefix_cache_queries_total", "one"][0].value == 140
    kinds = {name: found[name, "one"][1] for name in ("vllm:num_requests_running", "vllm:num_requests_waiting")}
    assert set(kinds.values()) == {"gauge"} and found["vllm:kv_cache_usage_perc", "one"][1] == "gauge"
    config = {model: found["vllm:cache_config_info", model][0].labels for model in ("one", "other")}
    assert (config["one"]["block_size"], config["one"]["num_gpu_blocks"]) == ("32", "8")
    assert config["other"]["enable_prefix_caching"] == "False"


def test_a_closed_engine_has_empty_caches(fakes):
    engine, url = fakes
    engine.close()
    assert engine.cache_use[:4] == (0, 0, 0, 0)
    assert samples(url)["specstep_cache_usage", "one"][0].value == 0

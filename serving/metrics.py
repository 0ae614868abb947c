"""What Prometheus reads. Labels are names of served models, routes and status codes: nothing that a client writes."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..runtime.asked.request import Request
from .served import Served
from .vllm_metrics import VllmNames

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server."""

    def __init__(self, served: Iterable[Served]):
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "specstep_http_requests", "Calls by route and status", ["route", "status"], registry=registry
        )
        self._call_seconds = Histogram(
            "specstep_http_request_seconds", "Time of calls", ["route"], buckets=SECONDS, registry=registry
        )
        model = ["model"]
        self._answers = Counter(
            "specstep_answers", "Choices that ended, by reason", ["model", "reason"], registry=registry
        )
        self._prompt = Counter("specstep_prompt_tokens", "Tokens of prompts, of each choice", model, registry=registry)
        self._cached = Counter(
            "specstep_cached_prompt_tokens", "Those of them that needed no prefill", model, registry=registry
        )
        self._new = Counter("specstep_generated_tokens", "New tokens", model, registry=registry)
        self._steps = Counter("specstep_steps", "Steps that choices took part in", model, registry=registry)
        self._verified = Counter(
            "specstep_verified_drafts", "Drafted tokens that steps verified", model, registry=registry
        )
        self._accepted = Counter(
            "specstep_accepted_drafts", "Drafted tokens that the target agreed with", model, registry=registry
        )
        self._queue = Histogram(
            "specstep_queue_seconds", "From submission to a row", model, buckets=SECONDS, registry=registry
        )
        self._prefill = Histogram(
            "specstep_prefill_seconds", "From a row to its first step", model, buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            "specstep_time_to_first_token_seconds",
            "From submission to the first tokens",
            model,
            buckets=SECONDS,
            registry=registry,
        )
        served = list(served)
        levels = _Levels(served)
        registry.register(levels)
        copied = (levels, self._prompt, self._cached, self._new, self._verified, self._accepted, self._first)
        registry.register(VllmNames(served, copied))

    def called(self, route: str, status: int, seconds: float) -> None:
        """Count a call."""
        self._calls.labels(route, str(status)).inc()
        self._call_seconds.labels(route).observe(seconds)

    def ended(self, model: str, request: Request) -> None:
        """Count a choice that has ended, for whatever reason."""
        self._answers.labels(model, request.finish_reason or "cancelled").inc()
        if not request.tokens:
            return
        self._prompt.labels(model).inc(len(request.prompt))
        self._cached.labels(model).inc(request.cached_tokens)
        self._new.labels(model).inc(len(request.tokens))
        self._steps.labels(model).inc(request.steps)
        self._verified.labels(model).inc(sum(request.nodes))
        self._accepted.labels(model).inc(sum(depth * steps for depth, steps in request.accepted.items()))
        self._queue.labels(model).observe(request.queue_s)
        self._prefill.labels(model).observe(request.prefill_s)
        self._first.labels(model).observe(request.first_token_s)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Levels(Collector):
    """How full the rows and the queues are, read when Prometheus asks."""

    def __init__(self, served: list[Served]):
        self._served = served

    def collect(self) -> Iterable[Metric]:
        """One gauge after the other."""
        for name, text, read in (
            ("specstep_rows", "Rows of the engine", lambda served: served.rows),
            ("specstep_running", "Choices that have a row", lambda served: served.engine.occupancy.running),
            ("specstep_waiting", "Choices that wait for a row", lambda served: served.engine.occupancy.waiting),
            ("specstep_cache_usage", "Tokens in the rows over those that fit, 0 to 1", _row_use),
            ("specstep_prefix_cache_usage", "Blocks in the prefix cache over those that fit, 0 to 1", _prefix_use),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for served in self._served:
                gauge.add_metric([served.name], read(served))
            yield gauge


def _row_use(served: Served) -> float:
    use = served.engine.cache_use
    return use.tokens / max(use.slots, 1)


def _prefix_use(served: Served) -> float:
    use = served.engine.cache_use
    return use.blocks / max(use.most_blocks, 1)

"""Metrics of ours under vLLM's names, by which schedulers route that know vLLM: llm-d's and the Gateway API's.

Names and labels are those of vLLM's `v1/metrics/loggers.py`; what schedulers ask for is in the Gateway API inference
extension's model server protocol. The values are our own metrics', read when Prometheus asks.
"""

from collections.abc import Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .served import Served

NAMES = (
    ("specstep_running", "vllm:num_requests_running"),
    ("specstep_waiting", "vllm:num_requests_waiting"),
    ("specstep_cache_usage", "vllm:kv_cache_usage_perc"),
    ("specstep_prompt_tokens", "vllm:prompt_tokens"),
    ("specstep_prompt_tokens", "vllm:prefix_cache_queries"),
    ("specstep_cached_prompt_tokens", "vllm:prefix_cache_hits"),
    ("specstep_generated_tokens", "vllm:generation_tokens"),
    ("specstep_verified_drafts", "vllm:spec_decode_num_draft_tokens"),
    ("specstep_accepted_drafts", "vllm:spec_decode_num_accepted_tokens"),
    ("specstep_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
)
ENGINE = "0"  # vLLM counts the engines of a server; each of our models has one


class VllmNames(Collector):
    """Copies of metrics with other names, and what vLLM says of its cache."""

    def __init__(self, served: Sequence[Served], ours: Sequence[Collector]):
        """ours: the collectors of the metrics that are copied."""
        self._served, self._ours = served, ours

    def collect(self) -> Iterable[Metric]:
        """One metric after the other."""
        found = {metric.name: metric for collector in self._ours for metric in collector.collect()}
        for ours, name in NAMES:
            yield _renamed(found[ours], name)
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        """Blocks of the prefix cache: its labels are what a router by prefix takes for their size and number."""
        labels = ["model_name", "engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Blocks that fit in the prefix cache", labels=labels)
        for served in self._served:
            use = served.engine.cache_use
            told = [served.name, ENGINE, str(use.block_tokens), str(use.most_blocks), str(use.most_blocks > 0)]
            info.add_metric(told, 1)
        return info


def _renamed(metric: Metric, name: str) -> Metric:
    """A metric whose samples have another name, and vLLM's label for the model."""
    copy = Metric(name, f"As {metric.name}", metric.type)
    for sample in metric.samples:
        labels = {"model_name" if label == "model" else label: value for label, value in sample.labels.items()}
        copy.add_sample(sample.name.replace(metric.name, name, 1), {**labels, "engine": ENGINE}, sample.value)
    return copy

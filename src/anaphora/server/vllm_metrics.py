"""The same counters under vLLM's names and labels, so that dashboards and routers made for it work here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Counter, Histogram

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.stats import EngineStats

_LABELS = ("model_name", "engine")


class VllmNames:
    """vLLM 0.32's metrics, as far as this engine has what they tell. There is one engine, number 0."""

    def __init__(
        self,
        model: str,
        engine_stats: Callable[[], EngineStats],
        manager: KVCacheManager | None,
        ttft: Histogram,
        itl: Histogram,
        requests: Counter,
    ) -> None:
        self._labels = (model, "0")
        self._engine_stats = engine_stats
        self._manager = manager
        self._ttft = ttft
        self._itl = itl
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls it."""
        stats = self._engine_stats()
        num_computed = stats.prompt_tokens - stats.cached_tokens
        # vLLM counts what its offloading brings back from host memory as external.
        from_host, from_device = stats.host_cached_tokens, stats.cached_tokens - stats.host_cached_tokens
        has_host = self._manager is not None and self._manager.num_host_blocks > 0
        asked_of_host = stats.prompt_tokens - from_device if has_host else 0
        for name, help_text, value in (
            ("prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens that the prefix cache had.", from_device),
            ("external_prefix_cache_queries", "Prompt tokens that host memory was asked for.", asked_of_host),
            ("external_prefix_cache_hits", "Prompt tokens that came back from host memory.", from_host),
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", stats.cached_tokens),
            ("generation_tokens", "Tokens generated.", stats.output_tokens),
            ("num_preemptions", "Times that a request gave its blocks back to others.", stats.num_preemptions),
        ):
            yield self._add(CounterMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), value)
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV is from.", labels=[*_LABELS, "source"]
        )
        for source, count in (
            ("local_compute", num_computed),
            ("local_cache_hit", from_device),
            ("external_kv_transfer", from_host),
        ):
            by_source.add_metric([*self._labels, source], count)
        yield by_source
        for name, help_text, gauge in (
            ("kv_cache_usage_perc", "Share of the KV pool that requests hold, 0 to 1.", stats.kv_usage),
            ("num_requests_running", "Requests that hold KV blocks.", stats.num_running),
            ("num_requests_waiting", "Requests that wait for KV blocks.", stats.num_waiting),
        ):
            yield self._add(GaugeMetricFamily(f"vllm:{name}", help_text, labels=_LABELS), gauge)
        if self._manager is not None:
            config = {"block_size": self._manager.block_size, "num_gpu_blocks": self._manager.num_blocks}
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "Settings of the cache.", labels=["engine", "enable_prefix_caching", *config]
            )
            info.add_metric(["0", "True", *map(str, config.values())], 1)
            yield info
        yield self._renamed(self._ttft, "vllm:time_to_first_token_seconds")
        yield self._renamed(self._itl, "vllm:inter_token_latency_seconds")
        yield self._renamed(self._requests, "vllm:request_success", {"finish_reason": "finished_reason"})

    def _add(
        self, family: CounterMetricFamily | GaugeMetricFamily, value: float
    ) -> CounterMetricFamily | GaugeMetricFamily:
        family.add_metric(self._labels, value)
        return family

    def _renamed(self, metric: Counter | Histogram, name: str, labels: dict[str, str] | None = None) -> Metric:
        (family,) = metric.collect()
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            own = {(labels or {}).get(key, key): value for key, value in sample.labels.items()}
            renamed.add_sample(
                name + sample.name.removeprefix(family.name),
                {**dict(zip(_LABELS, self._labels, strict=True)), **own},
                sample.value,
            )
        return renamed

"""What the cache and its events count, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from anaphora.cache.manager import KVCacheManager
    from anaphora.cache.residency import Histogram
    from anaphora.cache.stats import CacheStats
    from anaphora.server.kv_events import KvEvents


class CacheCollector:
    """The cache's counters at the time of a scrape."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls it."""
        manager = self._manager
        stats = manager.stats()
        blocks = GaugeMetricFamily(
            "anaphora_blocks",
            "Blocks of the pool: blank, cached and held by nobody, held by requests.",
            labels=["state"],
        )
        num_available, num_cached = manager.num_free_blocks, manager.num_cached_blocks
        blocks.add_metric(["free"], max(0, num_available - num_cached))
        blocks.add_metric(["evictable"], num_cached)
        blocks.add_metric(["pinned"], manager.num_blocks - num_available)
        yield blocks
        for name, help_text, value in (
            ("prefix_cache_query_tokens", "Prompt tokens that the prefix cache was asked for.", stats.queries),
            ("prefix_cache_preempted_query_tokens", "The same, of requests that came back.", stats.preempted_queries),
            ("prefix_cache_preempted_hit_tokens", "Those of them that it had, mostly their own.", stats.preempted_hits),
            ("evicted_blocks", "Cached blocks that were taken for something else.", stats.evicted_blocks),
        ):
            yield CounterMetricFamily(f"anaphora_{name}", help_text, value=value)
        hits = CounterMetricFamily(
            "anaphora_prefix_cache_hit_tokens", "Prompt tokens that the prefix cache had.", labels=["tier"]
        )
        for tier, num_hits in stats.hits_by_tier.items():
            if tier == "device" or manager.num_host_blocks:
                hits.add_metric([tier], num_hits)
        yield hits
        if manager.num_host_blocks:
            yield from self._host_metrics(stats)
        if manager.measures_residency:
            residency = manager.residency()
            for name, help_text, histogram in (
                ("lifetime", "From when a block became findable until it was evicted.", residency.lifetime_s),
                ("idle_before_evict", "How long an evicted block had lain idle.", residency.idle_before_eviction_s),
                ("reuse_gap", "How long a block that is used again had lain idle.", residency.reuse_gap_s),
            ):
                yield _histogram(f"anaphora_block_{name}_seconds", help_text, histogram)

    def _host_metrics(self, stats: CacheStats) -> Iterator[Metric]:
        manager = self._manager
        blocks = GaugeMetricFamily("anaphora_host_blocks", "Blocks of host memory: blank, cached.", labels=["state"])
        blocks.add_metric(["free"], manager.num_host_blocks - manager.num_cached_host_blocks)
        blocks.add_metric(["cached"], manager.num_cached_host_blocks)
        yield blocks
        for name, help_text, value in (
            ("saved_blocks", "Evicted blocks that were copied to host memory.", stats.saved_blocks),
            ("loaded_blocks", "Blocks that were copied back from host memory.", stats.loaded_blocks),
            ("host_evicted_blocks", "Blocks that were lost from host memory too.", stats.host_evicted_blocks),
        ):
            yield CounterMetricFamily(f"anaphora_{name}", help_text, value=value)


class KvEventCollector:
    """The counters of a publisher of KV events."""

    def __init__(self, kv_events: KvEvents) -> None:
        self._kv_events = kv_events

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls it."""
        stats = self._kv_events.publisher.stats()
        by_type = CounterMetricFamily("anaphora_kv_events", "KV events that happened.", labels=["type"])
        for kind, count in self._kv_events.num_by_type.items():
            by_type.add_metric([kind], count)
        yield by_type
        for name, help_text, value in (
            ("batches_published", "Batches of KV events that were sent.", stats.num_published),
            ("batches_dropped", "Batches of KV events that were not: the queue was full.", stats.num_dropped),
            ("replays", "Replays of KV events that were asked for.", stats.num_replays),
        ):
            yield CounterMetricFamily(f"anaphora_kv_event_{name}", help_text, value=value)
        yield GaugeMetricFamily("anaphora_kv_event_queue", "Batches that wait to be sent.", value=stats.num_queued)


def _histogram(name: str, help_text: str, histogram: Histogram) -> HistogramMetricFamily:
    # The sum is of the buckets' upper bounds: the cache keeps counts alone.
    buckets, count, total = [], 0, 0.0
    for bound, in_bucket in histogram.buckets():
        count += in_bucket
        total += bound * in_bucket
        buckets.append((str(bound), float(count)))
    return HistogramMetricFamily(name, help_text, buckets=[*buckets, ("+Inf", float(count))], sum_value=total)

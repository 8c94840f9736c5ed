"""What a server tells Prometheus. Each app has a registry of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from anaphora.server.cache_metrics import CacheCollector, KvEventCollector
from anaphora.server.vllm_metrics import VllmNames
from anaphora.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from anaphora.cache.manager import KVCacheManager
    from anaphora.engine.request import Delta, FinishReason
    from anaphora.engine.stats import EngineStats
    from anaphora.server.kv_events import KvEvents

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
# A series beside every other one, with the time since which it counts: nobody here reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class Metrics:
    """Latencies and outcomes as requests go by; the engine's own counters are read when Prometheus asks.

    engine_stats: returns the engine's counters; called from any thread.
    manager, kv_events: whose counters are shown too.
    clock: returns seconds.
    """

    def __init__(
        self,
        model: str,
        engine_stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.perf_counter,
        *,
        manager: KVCacheManager | None = None,
        kv_events: KvEvents | None = None,
    ) -> None:
        self.clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, engine_stats))
        self._requests = Counter(
            "anaphora_requests", "Requests by how they ended.", ["finish_reason"], registry=self._registry
        )
        for reason in _FINISH_REASONS:  # so that a rate over them starts from 0
            self._requests.labels(reason)
        self._ttft = Histogram(
            "anaphora_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._itl = Histogram(
            "anaphora_inter_token_latency_seconds",
            "From one token of a request to the next.",
            buckets=_ITL_BUCKETS_S,
            registry=self._registry,
        )

        self._registry.register(VllmNames(model, engine_stats, manager, self._ttft, self._itl, self._requests))
        if manager is not None:
            self._registry.register(CacheCollector(manager))
        if kv_events is not None:
            self._registry.register(KvEventCollector(kv_events))

    def start_request(self, started: float) -> RequestTimer:
        """Follow a request that arrived at `started`."""
        return RequestTimer(started, self.clock, self._ttft, self._itl, self._requests)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type, in the format that the Accept header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class RequestTimer:
    """Times one request's tokens."""

    __slots__ = ("_clock", "_has_token", "_itl", "_last", "_requests", "_ttft")

    def __init__(
        self, started: float, clock: Callable[[], float], ttft: Histogram, itl: Histogram, requests: Counter
    ) -> None:
        self._last = started
        self._clock = clock
        self._has_token = False
        self._ttft = ttft
        self._itl = itl
        self._requests = requests

    def observe(self, delta: Delta) -> None:
        """Note the arrival of a delta."""
        if not delta.token_ids:
            return
        now = self._clock()
        (self._itl if self._has_token else self._ttft).observe(now - self._last)
        self._has_token = True
        self._last = now

    def finish(self, reason: FinishReason) -> None:
        """Note how the request ended."""
        self._requests.labels(reason).inc()


class _EngineCollector:
    """The engine's counters at the time of a scrape."""

    _COUNTERS = (
        ("prompt_tokens", "Prompt tokens of admitted requests: what the prefix cache was asked for."),
        ("cached_tokens", "Prompt tokens that the prefix cache had: hits."),
        ("computed_prompt_tokens", "Prompt tokens that went through the model, recomputed ones included."),
        ("output_tokens", "Tokens generated."),
    )
    _TIMES = (
        ("step_s", "engine_step", "Time in engine steps."),
        ("execute_s", "engine_execute", "Time in the model, a part of the steps'."),
        ("step_cpu_s", "engine_step_cpu", "CPU time of the engine's thread in engine steps."),
        ("schedule_cpu_s", "engine_schedule_cpu", "CPU time in scheduling, a part of the steps'."),
        ("commit_cpu_s", "engine_commit_cpu", "CPU time in commits and ends of sequences, a part of the steps'."),
    )
    _GAUGES = (
        ("num_running", "requests_running", "Requests that hold KV blocks."),
        ("num_waiting", "requests_waiting", "Requests that wait for KV blocks."),
        ("num_blocks", "kv_blocks", "Blocks of the KV pool."),
        ("num_free_blocks", "kv_free_blocks", "Blocks that no request holds, cached ones included."),
        ("kv_usage", "kv_usage_ratio", "Share of the KV pool that requests hold, 0 to 1."),
    )

    def __init__(self, model: str, engine_stats: Callable[[], EngineStats]) -> None:
        self._build = {"version": __version__, "model": model}
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._engine_stats()
        yield InfoMetricFamily("anaphora_server", "What is running.", value=self._build)
        for name, help_text in self._COUNTERS:
            yield CounterMetricFamily(f"anaphora_{name}", help_text, value=getattr(stats, name))
        yield CounterMetricFamily("anaphora_engine_steps", "Steps of the engine.", value=stats.num_steps)
        yield CounterMetricFamily(
            "anaphora_preemptions", "Times that a request gave its blocks back to others.", value=stats.num_preemptions
        )
        for attribute, name, help_text in self._TIMES:
            yield CounterMetricFamily(f"anaphora_{name}_seconds", help_text, value=getattr(stats, attribute))
        for attribute, name, help_text in self._GAUGES:
            yield GaugeMetricFamily(f"anaphora_{name}", help_text, value=getattr(stats, attribute))

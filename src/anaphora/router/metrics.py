"""What the router tells Prometheus."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from anaphora.router.fleet_state import Fleet, Routed

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_WINDOW = 200
# A series beside every other one, with the time since which it counts: nobody here reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]
_MIN_REPORTS = 20
DRIFT_LIMIT = 0.2
"""Share of the predicted and reported tokens by which they may differ before the alarm is raised."""


class Drift:
    """How far a replica's reports are from what was predicted, over its last requests.

    Predictions that a replica exceeds are drift too: it knows prefixes that we do not.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, int]] = deque(maxlen=_WINDOW)

    def add(self, predicted: int, reported: int) -> None:
        """One answered request."""
        self._pairs.append((predicted, reported))

    @property
    def share(self) -> float:
        """Tokens that were predicted or reported, but not both, by the larger of the two: 0 to 1."""
        wrong = sum(abs(predicted - reported) for predicted, reported in self._pairs)
        larger = sum(max(pair) for pair in self._pairs)
        return wrong / larger if larger else 0.0

    @property
    def is_alarming(self) -> bool:
        """Whether the share is over the limit, on enough requests to say so."""
        return len(self._pairs) >= _MIN_REPORTS and self.share > DRIFT_LIMIT


class Metrics:
    """Counters as requests go by; what the fleet knows is read when Prometheus asks."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(fleet, self))
        self.drifts: dict[str, Drift] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"anaphora_router_{name}", text, labels, registry=self._registry)

        self.requests = counter("requests", "Requests by replica and how they ended.", "replica", "outcome")
        self.retries = counter("retries", "Requests sent to another replica before the first byte.", "replica")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of the requests sent.", "replica")
        self.predicted = counter("predicted_cached_tokens", "Cached tokens that were predicted.", "replica")
        self.reported = counter("reported_cached_tokens", "Cached tokens that replicas reported.", "replica")
        self.compared = counter("predictions_compared", "Requests whose replica reported cached tokens.", "replica")
        self.compared_predicted = counter(
            "compared_predicted_cached_tokens", "Cached tokens predicted for those requests.", "replica"
        )
        self.rewrites = counter("model_rewrites", "Requests whose model was rewritten.", "rewrite", "model")
        self.source_lost = Gauge(
            "anaphora_router_source_lost",
            "1 while those who name replicas cannot be asked.",
            ["source"],
            registry=self._registry,
        )
        self.shed = counter("shed_requests", "Requests refused while saturated.", "priority")
        self.decision_s = Histogram(
            "anaphora_router_decision_seconds", "Time to decide.", buckets=_SECONDS, registry=self._registry
        )
        self.first_byte_s = Histogram(
            "anaphora_router_first_byte_seconds",
            "From a request's arrival to the first byte of its answer.",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.streams = Gauge("anaphora_router_requests_in_progress", "Requests now.", registry=self._registry)

    def observe_report(self, routed: Routed, replica: str) -> None:
        """The replica said how many tokens it had."""
        reported = routed.reported_tokens
        if reported is None:
            return
        predicted = routed.predicted_tokens(replica)
        self.reported.labels(replica).inc(reported)
        self.compared.labels(replica).inc()
        self.compared_predicted.labels(replica).inc(predicted)
        self.drifts.setdefault(replica, Drift()).add(predicted, reported)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _FleetCollector:
    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        now = fleet.clock()
        gauges = {
            "ready": ("1 if new requests may go there.", lambda r: float(r.can_take(now))),
            "inflight_requests": ("Unfinished requests sent from here.", lambda r: float(len(r.load.inflight))),
            "inflight_tokens": ("Prompt tokens still to compute.", lambda r: float(r.load.inflight_tokens(now))),
            "prefill_tokens_per_second": ("Measured speed.", lambda r: r.load.prefill_tokens_per_s),
            "known_blocks": ("Blocks that are known of.", lambda r: float(fleet.knowledge.index.num_blocks_of(r.name))),
            "is_precise": ("1 if its events are followed.", lambda r: float(fleet.knowledge.kind(r.name) == "precise")),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(f"anaphora_router_replica_{name}", text, labels=["replica"])
            for replica in fleet.replicas.values():
                family.add_metric([replica.name], read(replica))  # type: ignore[no-untyped-call]
            yield family
        drift = GaugeMetricFamily(
            "anaphora_router_prediction_drift", "Share of cached tokens predicted wrongly.", labels=["replica"]
        )
        alarm = GaugeMetricFamily(
            "anaphora_router_prediction_alarm", f"1 if the drift is over {DRIFT_LIMIT}.", labels=["replica"]
        )
        for replica_name, state in self._metrics.drifts.items():
            drift.add_metric([replica_name], state.share)
            alarm.add_metric([replica_name], float(state.is_alarming))
        yield drift
        yield alarm
        index = fleet.knowledge.index
        yield GaugeMetricFamily("anaphora_router_index_bytes", "Memory of the index.", value=index.num_bytes)
        yield GaugeMetricFamily("anaphora_router_index_blocks", "Blocks in the index.", value=index.tree.num_blocks)
        for name in index.counters.__slots__:
            short = name.removeprefix("num_")
            yield CounterMetricFamily(
                f"anaphora_router_index_{short}", "See docs/router.md.", value=getattr(index.counters, name)
            )

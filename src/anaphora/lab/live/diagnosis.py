"""One named cause for a low hit rate, from counters and configuration; and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anaphora.lab.importers.prometheus import GAUGES_PER_BATCH, ratio

if TYPE_CHECKING:
    from anaphora.lab.importers.prometheus import Metrics
    from anaphora.lab.live.events import EventWatch
    from anaphora.lab.live.server import Config

CAUSES = {
    "no_metrics": "the server has no metrics",
    "not_counted": "the server counts no prefix cache",
    "disabled": "prefix caching is switched off",
    "no_traffic": "nothing was asked yet",
    "cleared": "the cache is emptied again and again",
    "below_minimum": "prompts are shorter than what can be shared",
    "split": "the same beginnings are cached under several names: a salt, an adapter or media keep them apart",
    "large_blocks": "blocks are so large that shared beginnings do not fill one",
    "second_tier": "hits come from the second tier, not from the device",
    "preempted": "requests lose their blocks to others while they run",
    "evicted": "memory is full: prefixes are evicted before they come again",
    "cold_start": "the rate since the start is low, the present one is not",
    "nothing_shared": "prompts do not begin alike, or a salt keeps them apart",
    "not_reported": "the server hits; its answers do not say so",
    "healthy": "the cache works",
}
"""Every cause, in the order in which they are looked for."""

_LOW, _GOOD = 0.1, 0.3
_FULL = 0.9
_LARGE_BLOCK = 128
_PREEMPTED_SHARE = 0.05
_BACK_SHARE = 0.05
_SPLIT_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """cause: a key of CAUSES. fix: what to do. facts: what was read, None for not known. notes: what misleads."""

    cause: str
    fix: str
    facts: dict[str, float | int | str | bool | None]
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The cause in words."""
        return CAUSES[self.cause]


def diagnose(
    metrics: Metrics | None, config: Config, earlier: Metrics | None = None, events: EventWatch | None = None
) -> Diagnosis:
    """Name the cause. earlier: a scrape from before, so that the present can be told from the time since the start.
    events: what the server's KV events told meanwhile.
    """
    if metrics is None or not metrics.samples:
        return Diagnosis(
            "no_metrics", "start SGLang with --enable-metrics; vLLM and Anaphora serve /metrics by themselves",
            _facts(metrics, config, earlier, events),
        )  # fmt: skip
    cause, fix = _cause(metrics, config, earlier, events)
    return Diagnosis(cause, fix, _facts(metrics, config, earlier, events), _notes(metrics, earlier))


def _cause(metrics: Metrics, config: Config, earlier: Metrics | None, events: EventWatch | None) -> tuple[str, str]:
    now = metrics.rate_since(earlier) if earlier is not None else None
    rate = now if now is not None else metrics.hit_rate
    minimum = config.min_shareable_tokens
    average = ratio(metrics.prompt_tokens, metrics.num_requests)
    if config.is_enabled is False:
        flag = "--disable-radix-cache" if config.engine == "sglang" else "--no-enable-prefix-caching"
        return "disabled", f"start the server without {flag}"
    if metrics.query_tokens is None:
        return "not_counted", "update the server, or switch its prefix cache on: it shows no counter for it"
    if metrics.query_tokens == 0:
        return "no_traffic", "send requests and ask again; what other processes serve is counted there"
    if rate is not None and rate >= _LOW:
        if now is not None and (metrics.hit_rate or 0) < _LOW:
            return "cold_start", "use differences of counters between two scrapes; the start drags the average down"
        if config.reports_cached_tokens is False:
            return "not_reported", "start SGLang with --enable-cache-report to see cached tokens in answers"
        if rate >= _GOOD:
            note = "; if answers show none, start vLLM with --enable-prompt-tokens-details"
            return "healthy", "nothing to do" + (note if config.engine == "vllm" else "")
    if events is not None and events.num_cleared:
        return "cleared", (
            f"it was emptied {events.num_cleared:,} times while watched, and {events.num_back_after_clearing:,} blocks "
            "were computed again for that: find who calls /reset_prefix_cache, sleeps or loads weights"
        )
    if minimum is not None and average is not None and average < minimum:
        return "below_minimum", (
            f"prompts have {average:,.0f} tokens on average and a hit needs {minimum:,} or more: put what is shared "
            "first, or choose smaller blocks"
        )
    if events is not None and events.num_split_heads > _SPLIT_SHARE * max(1, events.num_heads):
        return "split", (
            f"{events.num_split_heads:,} of {events.num_heads:,} first blocks have the tokens of another one: use one "
            "salt for all who may share, and put what is shared before what differs"
        )
    external = ratio(
        metrics.samples.get("vllm:external_prefix_cache_hits_total"),
        metrics.samples.get("vllm:external_prefix_cache_queries_total"),
    )
    if external is not None and external >= _GOOD:
        return (
            "second_tier",
            "the device's memory is too small for the working set; what it evicts is found in the tier",
        )
    if metrics.preemptions and metrics.num_requests and metrics.preemptions / metrics.num_requests > _PREEMPTED_SHARE:
        return "preempted", "lower the number of running requests, or give the KV pool more memory"
    if events is not None and (events.back_share or 0) > _BACK_SHARE:
        return "evicted", (
            f"{events.num_back_after_eviction:,} of {events.num_stored:,} stored blocks had been there before: more "
            "memory, a host tier, fewer tenants a replica; `anaphora simulate` says what it brings"
        )
    evicted = metrics.samples.get("sglang:evicted_tokens_total", 0.0)
    if (metrics.usage is not None and metrics.usage >= _FULL) or evicted > metrics.query_tokens / 2:
        return (
            "evicted",
            "more memory, a host tier, fewer tenants a replica; `anaphora simulate` says what it brings",
        )
    if config.block_size is not None and config.block_size >= _LARGE_BLOCK:
        return "large_blocks", (
            f"a hit comes in steps of {config.block_size:,} tokens; a shorter shared beginning is lost. "
            "Hybrid models align blocks to their state: ask for the smallest block that the model allows"
        )
    advice = "find where prompts diverge: `anaphora explain` on a request log says the path and offset"
    if events is not None and events.num_heads > 1:
        advice += (
            f". {events.num_heads:,} different first blocks were stored and prompts part behind {events.num_shared:,} "
            "blocks" + ("" if events.num_shared else ": nothing that was stored was shared")
        )
    return "nothing_shared", advice


def _facts(
    metrics: Metrics | None, config: Config, earlier: Metrics | None, events: EventWatch | None
) -> dict[str, float | int | str | bool | None]:
    facts: dict[str, float | int | str | bool | None] = {
        "engine": config.engine,
        "prefix caching": None if config.is_enabled is None else ("on" if config.is_enabled else "off"),
        "block size": config.block_size,
        "shortest prompt that can hit": config.min_shareable_tokens,
    }
    if metrics is not None:
        facts |= {
            "asked tokens": metrics.query_tokens,
            "found tokens": metrics.hit_tokens,
            "hit rate since the start": metrics.hit_rate,
            "hit rate between the scrapes": metrics.rate_since(earlier) if earlier is not None else None,
            "KV pool in use": metrics.usage,
            "preemptions": metrics.preemptions,
            "tokens of an average prompt": ratio(metrics.prompt_tokens, metrics.num_requests),
        }
    return facts if events is None else facts | events.facts()


def _notes(metrics: Metrics, earlier: Metrics | None) -> list[str]:
    notes = [
        f"{name} is {metrics.samples[name]:g} and tells of the last batch alone; the counters are used instead"
        for name in GAUGES_PER_BATCH
        if name in metrics.samples
    ]
    if earlier is None:
        notes.append("counters run since the server's start; --interval tells the present rate from it")
    elif metrics.rate_since(earlier) is None:
        notes.append("between the scrapes nothing was asked, or the server was started anew")
    return notes

"""Prometheus text of vLLM, SGLang or Anaphora: what its counters say of the prefix cache."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.lab.importers.source import ReadReport

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
    "sglang:prompt_tokens_total",
    "anaphora_prompt_tokens_total",
)
_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
    "sglang:cached_tokens_total",
    "anaphora_cached_tokens_total",
)
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "anaphora_kv_usage_ratio")
_PREEMPTIONS = (
    "vllm:num_preemptions_total",
    "vllm:num_preemptions",
    "sglang:num_retracted_requests_total",
    "anaphora_preemptions_total",
)
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "anaphora_prompt_tokens_total")
_REQUESTS = (
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "sglang:num_requests_total",
    "anaphora_requests_total",
)
GAUGES_PER_BATCH = ("sglang:cache_hit_rate",)
"""Gauges that tell of the last batch alone, and are often 0 on a server that hits well."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape, labels summed. None: the server does not report it.

    query_tokens, hit_tokens: asked of the prefix cache and found there, since the server's start.
    usage: share of the KV pool in use, 0 to 1, the highest of all engines.
    """

    samples: dict[str, float]
    query_tokens: float | None
    hit_tokens: float | None
    usage: float | None
    preemptions: float | None
    prompt_tokens: float | None
    num_requests: float | None
    labels: dict[str, dict[str, str]]

    @property
    def hit_rate(self) -> float | None:
        """Hits over queries since the start; None where nothing was asked, or it is not reported."""
        return ratio(self.hit_tokens, self.query_tokens)

    def rate_since(self, earlier: Metrics) -> float | None:
        """Hits over queries between two scrapes; None where a counter went back (a restart) or nothing was asked."""
        if None in {self.hit_tokens, self.query_tokens, earlier.hit_tokens, earlier.query_tokens}:
            return None
        hits = (self.hit_tokens or 0) - (earlier.hit_tokens or 0)
        queries = (self.query_tokens or 0) - (earlier.query_tokens or 0)
        return hits / queries if queries > 0 and hits >= 0 else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """A share, or None where it is not known or of nothing."""
    return part / whole if part is not None and whole else None


def read_metrics(numbered: Iterable[tuple[int, str]], report: ReadReport) -> Metrics:
    """Read a scrape. Lines that are no samples are counted as bad."""
    values: dict[str, list[float]] = defaultdict(list)
    labels: dict[str, dict[str, str]] = {}
    for number, line in numbered:
        if line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            report.note_bad(number, "no sample in Prometheus' text format")
            continue
        try:
            value = float(sample[3])
        except ValueError:
            report.note_bad(number, "its value is no number")
            continue
        if math.isfinite(value):
            report.num_records += 1
            values[sample[1]].append(value)
            if sample[2] and sample[1] not in labels:
                labels[sample[1]] = dict(_LABEL.findall(sample[2]))
    samples = {name: math.fsum(each) for name, each in values.items()}
    usages = [max(values[name]) for name in _USAGE if name in values]
    return Metrics(
        samples,
        _first(samples, _QUERIES),
        _first(samples, _HITS),
        usages[0] if usages else None,
        _first(samples, _PREEMPTIONS),
        _first(samples, _PROMPT),
        _first(samples, _REQUESTS),
        labels,
    )


def _first(samples: dict[str, float], names: Sequence[str]) -> float | None:
    return next((samples[name] for name in names if name in samples), None)


def looks_prometheus(line: str) -> bool:
    """A comment or a sample of a scrape."""
    return line.startswith(("# HELP", "# TYPE")) or (":" in line.partition("{")[0] and _SAMPLE.match(line) is not None)

"""What engines say of themselves in their metrics: vLLM's, SGLang's, TensorRT-LLM's and Anaphora's names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})? ([-+.\deE]+|NaN|[+-]Inf)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "trtllm_num_requests_running",
    "anaphora_requests_running",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "trtllm_num_requests_waiting",
    "anaphora_requests_waiting",
)
_KV_USAGE = ("vllm:kv_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization", "anaphora_kv_usage_ratio")
_COUNTERS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "anaphora_prompt_tokens_total")
_CACHE = {"vllm:cache_config_info", "sglang:cache_config_info"}
_RANK_LABELS = {"engine", "dp_rank"}
"""vLLM's name and SGLang's."""
_LORA = "vllm:lora_requests_info"
ANAPHORA_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One scrape. None or 0: the engine does not say. prompt_tokens: a counter, which only a restart sets back."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    block_size: int | None = None
    num_blocks: int | None = None
    started: float | None = None
    prompt_tokens: float | None = None
    adapters_running: frozenset[str] = frozenset()
    adapters_waiting: frozenset[str] = frozenset()
    max_adapters: int = 0


def read_metrics(text: str, rank: int | None = None) -> EngineMetrics:
    """Read an exposition in Prometheus's text format; unknown lines are skipped.

    rank: of a data-parallel engine: what other ranks say is skipped too. None: several ranks add up.
    """
    sums: dict[str, float] = {}
    cache: dict[str, str] = {}
    lora: tuple[float, dict[str, str]] = (-1.0, {})
    for name, labels, value in _SAMPLE.findall(text):
        if rank is not None and any(n in _RANK_LABELS and v != str(rank) for n, v in _LABEL.findall(labels)):
            continue
        if name in _CACHE:
            cache |= dict(_LABEL.findall(labels))
        try:
            number = float(value)
        except ValueError:
            continue
        if name == _LORA:
            lora = max(lora, (number, dict(_LABEL.findall(labels))), key=lambda pair: pair[0])
        elif not math.isnan(number):
            sums[name] = max(sums.get(name, 0.0), number) if name in _KV_USAGE else sums.get(name, 0.0) + number

    def first(names: tuple[str, ...]) -> float | None:
        return next((sums[name] for name in names if name in sums), None)

    block_size = _whole(cache.get("block_size") or cache.get("page_size"))
    num_blocks = _whole(cache.get("num_gpu_blocks") or cache.get("num_pages"))
    if "anaphora_kv_blocks" in sums:
        block_size, num_blocks = ANAPHORA_BLOCK_SIZE, int(sums["anaphora_kv_blocks"])
    return EngineMetrics(
        num_running=_bounded(first(_RUNNING)),
        num_waiting=_bounded(first(_WAITING)),
        kv_usage=min(max(first(_KV_USAGE) or 0.0, 0.0), 1.0),
        block_size=block_size,
        num_blocks=num_blocks,
        started=sums.get("process_start_time_seconds"),
        prompt_tokens=first(_COUNTERS),
        adapters_running=_names(lora[1].get("running_lora_adapters")),
        adapters_waiting=_names(lora[1].get("waiting_lora_adapters")),
        max_adapters=_whole(lora[1].get("max_lora")) or 0,
    )


def _bounded(value: float | None) -> int:
    return int(min(max(value or 0.0, 0.0), 1e9))


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and 0 < int(text) < 10**12 else None


def _names(text: str | None) -> frozenset[str]:
    return frozenset(name.strip() for name in (text or "").split(",") if name.strip())

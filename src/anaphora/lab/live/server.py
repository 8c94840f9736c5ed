"""What a server tells over HTTP: metrics, and its configuration where it shows one. Standard library only."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from anaphora.lab.importers.prometheus import Metrics, read_metrics
from anaphora.lab.importers.source import LogError, ReadReport, lines

_TIMEOUT_S = 10
_MAX_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Config:
    """What is known of a server's cache. None: not known.

    engine: vllm, sglang, anaphora. recomputes_last_block: speculative decoding drops the last block of each hit.
    """

    engine: str | None = None
    is_enabled: bool | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    reports_cached_tokens: bool | None = None
    recomputes_last_block: bool = False

    @property
    def min_shareable_tokens(self) -> int | None:
        """The shortest prompt whose repeat is a hit: one whole block, and a token that is always computed; a block
        more where the last of a hit is computed again."""
        if self.block_size is None:
            return None
        return self.block_size * (2 if self.recomputes_last_block else 1) + 1


def parse_metrics(text: bytes) -> Metrics:
    """A scrape."""
    report = ReadReport("prometheus")
    return read_metrics(lines(io.BufferedReader(io.BytesIO(text)), report), report)


def fetch_metrics(url: str) -> Metrics | None:
    """Scrape a server; None if it has no metrics. Raises LogError: it cannot be reached."""
    found = _fetch(f"{url}/metrics")
    return None if found is None else parse_metrics(found)


def fetch_config(url: str, metrics: Metrics | None) -> Config:
    """The cache's configuration, from vLLM's `cache_config_info` or SGLang's `/get_server_info`."""
    info: dict[str, Any] = {}
    if metrics is None or any(name.startswith("sglang:") for name in metrics.samples):
        for path in ("/get_server_info", "/server_info"):
            text = _fetch(url + path)
            if text is not None:
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict):
                    info = value.get("server_args", value) if isinstance(value.get("server_args"), dict) else value
                    break
    return config_of(metrics, info)


def fetch_json(url: str) -> object:
    """What a server answers; None where there is nothing, or no JSON. Raises LogError: it cannot be reached."""
    found = _fetch(url)
    try:
        return None if found is None else json.loads(found)
    except (ValueError, RecursionError):
        return None


def config_of(metrics: Metrics | None, info: dict[str, Any] | None = None) -> Config:
    """What metrics and a server's own description say of its cache."""
    samples = metrics.samples if metrics is not None else {}
    if info and "disable_radix_cache" in info:
        page = info.get("page_size")
        return Config(
            "sglang",
            not info["disable_radix_cache"],
            page if isinstance(page, int) else 1,
            reports_cached_tokens=bool(info.get("enable_cache_report")),
            recomputes_last_block=False,
        )
    engines = ("anaphora", "sglang", "vllm")  # ours writes vLLM's counters beside its own
    engine = next((e for e in engines if any(name.startswith((f"{e}:", f"{e}_")) for name in samples)), None)
    labels = metrics.labels.get("vllm:cache_config_info", {}) if metrics is not None else {}
    enabled = labels.get("enable_prefix_caching", "").lower()
    return Config(
        engine,
        {"true": True, "false": False}.get(enabled),
        _number(labels.get("block_size")) or (1 if engine == "sglang" else 16 if engine == "anaphora" else None),
        _number(labels.get("num_gpu_blocks")),
        True if engine == "anaphora" else None,
        any(name.startswith("vllm:spec_decode_num_draft") for name in samples),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _fetch(url: str) -> bytes | None:
    """The body; None where the server answers that there is nothing."""
    try:
        with urlopen(Request(url, headers={"Accept": "text/plain, application/json"}), timeout=_TIMEOUT_S) as answer:
            body: bytes = answer.read(_MAX_BYTES)
            return body
    except HTTPError:
        return None
    except (URLError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise LogError(f"{url}: {reason}") from None

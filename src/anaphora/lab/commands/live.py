"""`anaphora explain URL`, and of a file with a server's metrics."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from anaphora.lab.commands.options import note

if TYPE_CHECKING:
    import argparse

    from anaphora.lab.importers.prometheus import Metrics
    from anaphora.lab.live.diagnosis import Diagnosis
    from anaphora.lab.live.events import EventWatch


_WATCH_S = 10.0
"""How long events are followed where nothing is said."""


def explain_url(args: argparse.Namespace, url: str) -> tuple[int, float | None]:
    """Ask a live server; print what was found. The exit code, and the hit rate if it is known. Raises LogError."""
    from anaphora.lab.live.diagnosis import diagnose
    from anaphora.lab.live.server import fetch_config, fetch_metrics

    root = url.rstrip("/").removesuffix("/v1").removesuffix("/metrics").rstrip("/")
    interval = args.interval or (_WATCH_S if args.kv_events else 0.0)
    earlier = fetch_metrics(root) if interval else None
    events = _follow(args, root, interval) if interval else None
    metrics = fetch_metrics(root)
    found = diagnose(metrics, fetch_config(root, metrics), earlier, events)
    return _show(args, root, found, metrics, earlier)


def _follow(args: argparse.Namespace, root: str, interval: float) -> EventWatch | None:
    """Let the interval pass, and follow the server's KV events meanwhile where it has some; without being asked for
    only where that can be done, since ZMQ and msgspec are optional."""
    from anaphora.lab.importers import LogError

    if args.kv_events or (find_spec("zmq") and find_spec("msgspec")):
        from anaphora.lab.live.events import source_of, watch
        from anaphora.lab.live.server import fetch_json

        source: tuple[str, str | None, str] | None
        if args.kv_events and args.kv_events != "auto":
            source = (args.kv_events, args.kv_events_replay, "")
        else:
            source = source_of(fetch_json(f"{root}/kv_event_sources"), root)
        if source is not None:
            note(f"following the KV events at {source[0]} for {interval:g} s")
            return watch(*source, interval)
        if args.kv_events:
            raise LogError(f"{root}: it does not tell where its KV events are: --kv-events tcp://HOST:PORT")
    note(f"waiting {interval:g} s for a second scrape")
    time.sleep(interval)
    return None


def explain_metrics(args: argparse.Namespace) -> tuple[int, float | None]:
    """The same of a scrape in a file. Raises LogError."""
    from anaphora.lab.importers.source import open_log
    from anaphora.lab.live.diagnosis import diagnose
    from anaphora.lab.live.server import config_of, parse_metrics

    with open_log(args.log) as stream:
        metrics = parse_metrics(stream.read())
    earlier = None
    if args.since is not None:
        with open_log(args.since) as stream:
            earlier = parse_metrics(stream.read())
    return _show(args, str(args.log), diagnose(metrics, config_of(metrics), earlier), metrics, earlier)


def _show(
    args: argparse.Namespace, name: str, found: Diagnosis, metrics: Metrics | None, earlier: Metrics | None
) -> tuple[int, float | None]:
    rate = None
    if metrics is not None:
        now = metrics.rate_since(earlier) if earlier is not None else None
        rate = now if now is not None else metrics.hit_rate
    if args.json:
        values = {"server": name, "cause": found.cause, "text": found.text, "fix": found.fix}
        print(json.dumps(values | {"facts": found.facts, "notes": found.notes}, indent=2))
        return 0, rate
    width = max(len(label) for label in found.facts)
    print(f"{name}\n")
    for label, value in found.facts.items():
        print(f"{label.ljust(width)}  {_spelled(label, value)}")
    print(f"\n{found.cause}: {found.text}.\nWhat to do: {found.fix}.")
    for text in found.notes:
        print(f"Note: {text}.")
    return 0, rate


def _spelled(label: str, value: float | int | str | bool | None) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    return f"{value:.2%}" if "rate" in label or "in use" in label else f"{value:,.0f}"

"""Envoy in front of replicas, alone or with our endpoint picker: a peer for `benchmarks.router.proxy`.

python -m benchmarks.router.proxy \
    --peer "Envoy alone" "python -m benchmarks.router.envoy --envoy PATH --port {port} --replicas {urls}" \
    --peer "Envoy, picker" "python -m benchmarks.router.envoy --envoy PATH --port {port} --replicas {urls} --picker"

Alone, Envoy sends requests round robin. With the picker it is configured as in examples/envoy/original_dst.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLE = Path(__file__).parents[2] / "examples/envoy/original_dst.yaml"
PICKER_OFFSET, ROUTER_OFFSET = 100, 200
"""From Envoy's port to the picker's, and to that of the router's own API."""


def configuration(port: int, replicas: Sequence[str], *, has_picker: bool) -> dict[str, Any]:
    """The example's, on another port; without the picker its filter is gone, and the replicas are a static cluster."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    fleet, picker = config["static_resources"]["clusters"]
    if has_picker:
        (endpoint,) = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = port + PICKER_OFFSET
        return config
    manager["http_filters"] = manager["http_filters"][-1:]
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": parts.hostname, "port_value": parts.port}}}}
        for parts in map(urlsplit, replicas)
    ]
    config["static_resources"]["clusters"] = [
        {
            "name": fleet["name"],
            "type": "STATIC",
            "connect_timeout": "3s",
            "load_assignment": {"cluster_name": fleet["name"], "endpoints": [{"lb_endpoints": endpoints}]},
        }
    ]
    return config


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.envoy")
    parser.add_argument("--envoy", required=True, metavar="PATH", help="Envoy's binary")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--replicas", nargs="+", required=True, metavar="URL")
    parser.add_argument("--picker", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # what was started ends with it
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        file = Path(folder, "envoy.json")
        file.write_text(json.dumps(configuration(args.port, args.replicas, has_picker=args.picker)))
        envoy = [args.envoy, "-c", str(file), "--disable-hot-restart", "--concurrency", "1", "-l", "error"]
        commands = [envoy]
        if args.picker:
            address = f"127.0.0.1:{args.port + PICKER_OFFSET}"
            router = [sys.executable, "-m", "anaphora.cli", "route", "--port", str(args.port + ROUTER_OFFSET)]
            router += ["--ext-proc", address]
            for url in args.replicas:
                router += ["--replica", url]
            commands.append(router)
        for command in commands:
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        process.wait()


if __name__ == "__main__":
    main()

"""What the proxy costs: CPU time a request, in front of workers that answer at once.

python -m benchmarks.router.proxy [--requests 1000] [--bytes 2000 32000]

CPU time of the router's process, all of it, by the requests that it passed on; wall time beside it is the client's, one
request after another, and means little on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from statistics import median

import httpx
import uvicorn

ANSWER = json.dumps(
    {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}
).encode()
PORTS = (8971, 8972)
ROUTER_PORT = 8970


async def worker(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def, type-arg]
    """Answers at once."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(url: str, num: int, num_bytes: int, pid: int | None) -> None:
    """Post `num` distinct prompts that share their first half; print a line."""
    shared = "a" * (num_bytes // 2)
    bodies = [{"model": "m", "prompt": shared + f"{i:08d}" * (num_bytes // 16)} for i in range(num)]
    with httpx.Client(base_url=url, timeout=30) as client:
        client.post("/v1/completions", json=bodies[0])
        before = cpu_s(pid) if pid else 0.0
        times = []
        for body in bodies:
            started = time.perf_counter()
            client.post("/v1/completions", json=body).raise_for_status()
            times.append(time.perf_counter() - started)
    used = f"{(cpu_s(pid) - before) / num * 1e6:.0f} us CPU" if pid else "-"
    print(
        f"| {'router' if pid else 'direct'} | {num_bytes} B | {used} | {median(times) * 1e6:.0f} us wall p50 |",
        flush=True,
    )


def main() -> None:
    """Start two workers and a router, and measure with and without it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.proxy")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[2000, 32_000])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        config = uvicorn.Config(worker, port=args.worker, log_level="error", lifespan="off")
        asyncio.run(uvicorn.Server(config).serve())
        return
    me = [sys.executable, "-m", "benchmarks.router.proxy"]
    workers = [subprocess.Popen([*me, "--worker", str(port)]) for port in PORTS]
    replicas = [part for port in PORTS for part in ("--replica", f"http://127.0.0.1:{port}")]
    command = [sys.executable, "-m", "anaphora.cli", "route", "--port", str(ROUTER_PORT), *replicas]
    router = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                httpx.get(f"http://127.0.0.1:{ROUTER_PORT}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        for num_bytes in args.bytes:
            measure(f"http://127.0.0.1:{PORTS[0]}", args.requests, num_bytes, None)
            measure(f"http://127.0.0.1:{ROUTER_PORT}", args.requests, num_bytes, router.pid)
    finally:
        for process in (router, *workers):
            process.terminate()


if __name__ == "__main__":
    main()

"""How the laboratory's cost grows: chats of 10,000 to a million requests over 1,000 virtual replicas.

    python benchmarks/laboratory/scale.py docs/laboratory-scale.svg

Each size is made by `anaphora workload` and run by `anaphora simulate` in a process of its own, whose CPU time and peak
memory are what the system says; once with the trace in memory, and once read as a stream. It takes some minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from anaphora.lab.charts import Curves, draw
from anaphora.lab.page import Table

SESSIONS = (3_000, 30_000, 100_000, 300_000)
OPTIONS = ("--replicas", "1000", "--capacity", "200", "--routing", "session", "--jobs", "1", "--json")
WAYS = {"in memory": (), "streamed": ("--stream",)}


class Run(NamedTuple):
    """One run: what it found, and what it cost."""

    num_requests: int
    cached_tokens: int
    cpu_s: float
    peak_mib: float


def main(picture: Path | None) -> None:
    """Measure every size both ways; print a table, and write the picture."""
    found: dict[str, list[Run]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "chat.jsonl"
        for sessions in SESSIONS:
            anaphora("workload", "chat", "--sessions", str(sessions), "--rate", "50", "--out", str(trace))
            for name, option in WAYS.items():
                found[name].append(run(trace, option))
            first, second = (found[name][-1] for name in WAYS)
            assert first[:2] == second[:2], "both ways find the same"
            print(f"{first.num_requests:,} requests done", file=sys.stderr, flush=True)
    rows = [
        [f"{one.num_requests:,}", f"{one.cpu_s:.1f}", f"{one.peak_mib:.0f}", f"{two.cpu_s:.1f}", f"{two.peak_mib:.0f}"]
        for one, two in zip(*found.values(), strict=True)
    ]
    print(Table(["requests", "CPU s", "peak MiB", "streamed: CPU s", "peak MiB"], rows).to_text())
    if picture is not None:
        label = "million requests over 1,000 replicas"
        times = {name: [(r.num_requests / 1e6, r.cpu_s) for r in runs] for name, runs in found.items()}
        sizes = {name: [(r.num_requests / 1e6, r.peak_mib) for r in runs] for name, runs in found.items()}
        picture.write_text(draw([Curves("CPU seconds", times, label), Curves("peak memory, MiB", sizes, label)]))


def run(trace: Path, option: tuple[str, ...]) -> Run:
    """One simulation in a process of its own."""
    output, cpu_s, peak_mib = anaphora("simulate", str(trace), *OPTIONS, *option)
    result = json.loads(output)
    return Run(result["trace"]["requests"], result["runs"][0]["cached_tokens"], cpu_s, peak_mib)


def anaphora(*arguments: str) -> tuple[str, float, float]:
    """Run a command; its output, CPU seconds and peak MiB."""
    command = [sys.executable, "-m", "anaphora.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"anaphora {arguments[0]} ended with {process.returncode}")
    return output, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

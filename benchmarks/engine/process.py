"""Engines under one driver, each in a process of its own that speaks JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.json_process import JsonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE_THREAD = "BENCHMARK_ONE_THREAD"
"""Set in a contestant's environment: it runs one thread, and CPU time is measured instead of the clock's."""


class Contestant(Protocol):
    """An engine with a model in it. Its cache is on, and large enough for everything that is asked of it."""

    version: str

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue all prompts at once by exactly `num_tokens` greedy tokens each."""


def num_threads() -> int:
    """How many threads a contestant computes with."""
    return 1 if ONE_THREAD in os.environ else len(os.sched_getaffinity(0))


def serve(make: Callable[[Sequence[str]], Contestant]) -> None:
    """Answer a driver's requests on stdin until it closes it. Whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contestant = make(sys.argv[1:])
    print(json.dumps({"version": contestant.version}), file=out, flush=True)
    clock = time.process_time if ONE_THREAD in os.environ else time.perf_counter
    for line in sys.stdin:
        request = json.loads(line)
        started = clock()
        contestant.run(request["prompts"], request["num_tokens"])
        print(json.dumps({"s": clock() - started, "peak_bytes": _peak_bytes()}), file=out, flush=True)


def _peak_bytes() -> int:
    """The most memory that this process has held at once; Linux only."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


class Process(JsonProcess):
    """The driver's end of a contestant's process.

    start_s: from its start until the model is loaded and the engine ready for a prompt.
    """

    def __init__(
        self, name: str, python: str, module: str, arguments: Sequence[str], *, has_one_thread: bool = False
    ) -> None:
        self.peak_bytes = 0
        environment = dict(os.environ)
        if has_one_thread:
            environment |= {ONE_THREAD: "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        started = time.perf_counter()
        super().__init__(name, python, module, arguments, environment)
        self.version: str = self.receive()["version"]
        self.start_s = time.perf_counter() - started

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Continue prompts; return the seconds that it took. Raises RuntimeError if the process dies."""
        answer = self.ask(prompts=prompts, num_tokens=num_tokens)
        self.peak_bytes = answer["peak_bytes"]
        seconds: float = answer["s"]
        return seconds

"""Engines under one driver, each in a process of its own that speaks JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE_THREAD = "BENCHMARK_ONE_THREAD"
"""Set in a contestant's environment: it runs one thread, and CPU time is measured instead of the clock's."""

REPOSITORY = Path(__file__).resolve().parents[2]


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


class Process:
    """The driver's end of a contestant's process.

    start_s: from its start until the model is loaded and the engine ready for a prompt.
    """

    def __init__(
        self, name: str, python: str, module: str, arguments: Sequence[str], *, has_one_thread: bool = False
    ) -> None:
        self.name = name
        self.peak_bytes = 0
        self._log = TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        environment = dict(os.environ)
        if has_one_thread:
            environment |= {ONE_THREAD: "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
            env=environment,
            text=True,
        )
        self.version: str = self._receive()["version"]
        self.start_s = time.perf_counter() - started

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Continue prompts; return the seconds that it took. Raises RuntimeError if the process dies."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._receive()
        self.peak_bytes = answer["peak_bytes"]
        seconds: float = answer["s"]
        return seconds

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name}: its process ended with {status}: {self._log.read()[-2000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

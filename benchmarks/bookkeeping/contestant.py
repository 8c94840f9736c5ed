"""Contestants: cache managers under one driver, each in a process of its own that speaks JSON lines."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.json_process import JsonProcess

from .workload import Prompts, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable


class Contestant(ABC):
    """A cache manager as an engine uses it."""

    @abstractmethod
    def prepare(self, tokens: bytes) -> Any:
        """Turn packed int32 ids into what the manager's engine would hand it. Not measured."""

    @abstractmethod
    def begin(self, prompt: Any) -> Any:
        """Admit a request: look up, pin, allocate for the rest, publish what is computed; decode if asked to."""

    @abstractmethod
    def end(self, request: Any) -> None:
        """Give back what the request holds."""

    @abstractmethod
    def hit_tokens(self, request: Any) -> int:
        """Tokens of a live request that were found in the cache."""


class Stage:
    """One contestant in one scenario: a full pool and the requests that are alive."""

    def __init__(self, make: Callable[[Scenario], Contestant], scenario: Scenario) -> None:
        self.contestant = make(scenario)
        self.scenario = scenario
        self._prompts = Prompts(scenario)
        self._live: deque[Any] = deque()
        # As engines do once they are set up: what exists now is no work for the collector, which stays on.
        gc.collect()
        gc.freeze()
        for _ in range(scenario.num_live):
            self._live.append(self.contestant.begin(self.contestant.prepare(self._prompts.next())))
        for _ in range(scenario.num_filling):
            self._serve([self.contestant.prepare(self._prompts.next())])

    def _serve(self, prompts: list[Any]) -> None:
        begin, end, live = self.contestant.begin, self.contestant.end, self._live
        for prompt in prompts:
            end(live.popleft())
            live.append(begin(prompt))

    def round(self, num_requests: int) -> dict[str, float]:
        """Serve requests; return thread CPU microseconds for each and the share of tokens that were hits."""
        # Other processes have run since the last round, so a few requests first bring the caches back.
        prompts = [self.contestant.prepare(self._prompts.next()) for _ in range(num_requests + num_requests // 4 + 1)]
        measured = prompts[-num_requests:]
        self._serve(prompts[:-num_requests])
        started = time.thread_time_ns()
        self._serve(measured)
        spent = time.thread_time_ns() - started
        hits = [self.contestant.hit_tokens(request) for request in self._live]
        return {"us": spent / 1000 / num_requests, "hit": sum(hits) / len(hits) / self.scenario.num_tokens}

    def close(self) -> None:
        """End the requests that are alive."""
        while self._live:
            self.contestant.end(self._live.popleft())
        gc.unfreeze()


def serve(version: str, contestants: dict[str, Callable[[Scenario], Contestant]]) -> None:
    """Answer a driver's requests on stdin until it closes it. Whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    answer({"version": version, "contestants": list(contestants)})
    stage: Stage | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "set_up":
            if stage is not None:
                stage.close()
            stage = None
            gc.collect()
            before = _resident_bytes()
            stage = Stage(contestants[request["contestant"]], Scenario(**request["scenario"]))
            answer({"resident_bytes": _resident_bytes() - before})
        elif request["do"] == "round" and stage is not None:
            answer(stage.round(request["num_requests"]))
        else:
            raise ValueError(f"do: {request['do']!r} is not known, or comes before set_up")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Process(JsonProcess):
    """The driver's end of a contestant's process. Raises RuntimeError if it dies."""

    def __init__(self, python: str, module: str, contestant: str) -> None:
        super().__init__(contestant, python, module)
        self.version = ""

    def connect(self) -> None:
        """Wait until it has imported what it needs."""
        self.version = self.receive()["version"]

    def set_up(self, scenario: Scenario) -> dict[str, Any]:
        """Make a manager and fill its pool."""
        return self.ask(do="set_up", contestant=self.name, scenario=asdict(scenario))

    def round(self, num_requests: int) -> dict[str, Any]:
        """Serve requests and measure."""
        return self.ask(do="round", num_requests=num_requests)

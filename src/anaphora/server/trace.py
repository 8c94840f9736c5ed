"""A trace of the engine's steps and requests, in the form that Perfetto and chrome://tracing open."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from anaphora.cache.events import AllBlocksCleared, BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from anaphora.cache.events import Event
    from anaphora.engine.loop import Engine
    from anaphora.engine.request import Delta, Request

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 * 2**20
_PROCESS, _STEPS, _CACHE = 1, 1, 2


class TraceError(Exception):
    """The file cannot be written; the message is one line that says why."""


class StepTrace:
    """An EngineObserver that writes Chrome's trace format: a span for each step, spans for each request (waiting,
    prefill, decode), an instant for each step's cache events, counters. No prompt, no salt is in it.

    The file is an array that is never closed, which the format allows, so it can be opened whatever happened. It ends
    at `max_bytes`, with a mark that says so.

    clock: seconds, the same as the service's.

    Raises:
        TraceError: the file cannot be opened.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._open: dict[str, str] = {}
        """By sample, the span of its request that is open."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        self._is_full = False
        self._put(b"[\n")
        self._write({"name": "process_name", "ph": "M", "args": {"name": "anaphora"}})
        for thread, name in ((_STEPS, "engine steps"), (_CACHE, "cache events")):
            self._write({"name": "thread_name", "ph": "M", "tid": thread, "args": {"name": name}})

    def submitted(self, request: Request) -> None:
        """A request begins to wait."""
        now = self._clock()
        for index in range(request.sampling.n):
            sample = f"{request.request_id}#{index}"
            self._begin(sample, "request", now)
            self._enter(sample, "waiting", now)

    def stepped(self, started_s: float, ended_s: float, engine: Engine, deltas: Sequence[Delta]) -> None:
        """A step was run."""
        spans = engine.last_batch
        num_prefill = 0
        for live, start, num_tokens in spans:
            if start < live.num_prompt_tokens:
                num_prefill += min(num_tokens, live.num_prompt_tokens - start)
                self._enter(f"{live.request_id}#{live.index}", "prefill", started_s)
        num_tokens = sum(num for _, _, num in spans)
        if spans or deltas:
            args = {"requests": len(spans), "tokens": num_tokens, "prefill_tokens": num_prefill}
            duration = _us(ended_s - started_s)
            self._write({"name": "step", "ph": "X", "ts": _us(started_s), "dur": duration, "tid": _STEPS, "args": args})
            stats = engine.stats()
            for name, values in (
                ("requests", {"running": stats.num_running, "waiting": stats.num_waiting}),
                ("KV blocks", {"held": stats.num_blocks - stats.num_free_blocks}),
            ):
                self._write({"name": name, "ph": "C", "ts": _us(ended_s), "args": values})
        for delta in deltas:
            if delta.token_ids:
                self._enter(f"{delta.request_id}#{delta.index}", "decode", ended_s)

    def ended(self, delta: Delta) -> None:
        """A request is over."""
        sample = f"{delta.request_id}#{delta.index}"
        now = self._clock()
        self._leave(sample, now)
        args = {
            "prompt_tokens": delta.num_prompt_tokens,
            "cached_tokens": delta.num_cached_tokens,
            "output_tokens": delta.num_output_tokens,
            "finish_reason": delta.finish_reason,
        }
        self._end(sample, "request", now, args)

    def cached(self, events: Sequence[Event]) -> None:
        """What a step did to the cache."""
        args = {"stored_blocks": 0, "removed_blocks": 0, "cleared": 0}
        for event in events:
            if isinstance(event, AllBlocksCleared):
                args["cleared"] += 1
            else:
                args["stored_blocks" if isinstance(event, BlockStored) else "removed_blocks"] += len(event.digests)
        self._write({"name": "cache", "ph": "i", "s": "t", "ts": _us(self._clock()), "tid": _CACHE, "args": args})

    def close(self) -> None:
        """Write what is left. Idempotent."""
        self._file.close()

    def _enter(self, sample: str, name: str, now: float) -> None:
        """`sample` is in another part of its life, unless it is in it already, or beyond."""
        if self._open.get(sample) in {name, "decode"}:
            return
        self._leave(sample, now)
        self._open[sample] = name
        self._begin(sample, name, now)

    def _leave(self, sample: str, now: float) -> None:
        name = self._open.pop(sample, None)
        if name is not None:
            self._end(sample, name, now)

    def _begin(self, sample: str, name: str, now: float) -> None:
        self._write({"name": name, "cat": "request", "ph": "b", "id": sample, "ts": _us(now)})

    def _end(self, sample: str, name: str, now: float, args: dict[str, Any] | None = None) -> None:
        self._write({"name": name, "cat": "request", "ph": "e", "id": sample, "ts": _us(now), "args": args or {}})

    def _write(self, event: dict[str, Any]) -> None:
        self._put(msgspec.json.encode({"pid": _PROCESS, "tid": _STEPS, **event}) + b",\n")

    def _put(self, line: bytes) -> None:
        if self._is_full:
            return
        if self._num_bytes + len(line) > self._max_bytes:
            self._is_full = True
            full = {"pid": _PROCESS, "name": "the trace is full", "ph": "i", "s": "g", "ts": _us(self._clock())}
            line = msgspec.json.encode(full) + b",\n"
        self._num_bytes += len(line)
        try:
            self._file.write(line)
            if self._is_full:
                self._file.flush()
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._is_full = True
            logger.warning("The trace ends here: %s", error)


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 1)

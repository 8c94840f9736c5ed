"""EngineService: an Engine on a thread of its own, for callers on many threads or on an event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.engine.request import Delta, RequestError
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from anaphora.cache.events import Event
    from anaphora.engine.loop import Engine
    from anaphora.engine.observer import EngineObserver
    from anaphora.engine.request import Request
    from anaphora.engine.stats import EngineStats

_logger = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The service takes no more requests: it was closed, or the engine has crashed."""


@dataclass(slots=True)
class _Consumer:
    on_delta: Callable[[Delta], None]
    last: dict[int, Delta]
    """By sample that has not ended, what was delivered last; before that, a delta that adds nothing."""


@dataclass(slots=True)
class _Errand:
    """Something to do on the engine's thread."""

    what: Callable[[], bool]
    future: Future[bool]

    def run(self) -> None:
        try:
            self.future.set_result(self.what())
        except Exception as error:
            self.future.set_exception(error)


class EngineService:
    """Runs an engine's steps while there is work, and sleeps without polling while there is none.

    Only the service's thread touches the engine; `submit` and `abort` leave word for it, which it reads between steps.
    Every sample of a request that was accepted gets exactly one last delta, whatever happens: finished, aborted,
    closed, crashed.

    `on_delta` is called on the service's thread and holds up every request while it runs, so it should only pass the
    delta on (`loop.call_soon_threadsafe`). If it raises, its request is aborted.
    """

    def __init__(
        self,
        engine: Engine,
        on_events: Callable[[list[Event]], None] | None = None,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """on_events: given what happened to cached blocks after each step, on the service's thread; the manager of the
        engine must record it. observer: told of each step, on the same thread."""
        self._engine = engine
        self._observer = observer
        self._clock = clock
        self._busy_since: float | None = None
        self._on_events = on_events
        self._thread = threading.Thread(target=self._run, name="anaphora-engine", daemon=True)
        self._changed = threading.Condition()
        # What follows is guarded by `_changed`.
        self._inbox: deque[Request | str | _Errand] = deque()
        """Requests to submit, ids to abort and errands to run, in the order of the calls."""
        self._consumers: dict[str, _Consumer] = {}
        self._is_closing = False
        self._is_draining = False
        self._crash: BaseException | None = None

    def __enter__(self) -> EngineService:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_healthy(self) -> bool:
        """Whether it takes requests: neither closed nor crashed."""
        return self._crash is None and not self._is_closing

    @property
    def busy_s(self) -> float:
        """Seconds since the thread last came round: the time that its step has taken so far, 0 while it sleeps. More
        than any step takes means that it is stuck."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    @property
    def is_running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    @property
    def engine(self) -> Engine:
        """The engine, for its limits. Its `validate` and `stats` may be called from any thread, the rest may not."""
        return self._engine

    def start(self) -> None:
        """Start the thread. RuntimeError if it was started before."""
        self._thread.start()

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> None:
        """Hand over a request; its deltas go to `on_delta`, the last one with a finish reason.

        Raises:
            RequestError: it can never be served, or its id is that of a live request.
            EngineClosedError: the service was closed, or its engine has crashed.
        """
        self._engine.validate(request)
        with self._changed:
            if self._crash is not None:
                raise EngineClosedError(f"the engine has crashed: {self._crash}")
            if self._is_closing:
                raise EngineClosedError("the engine is closed")
            if request.request_id in self._consumers:
                raise RequestError("request_id", f"request_id: {request.request_id!r} is in use by a live request")
            num_prompt_tokens = len(request.prompt) // TOKEN_BYTES
            self._consumers[request.request_id] = _Consumer(
                on_delta,
                {
                    index: Delta(request.request_id, (), "", num_prompt_tokens, 0, 0, index=index)
                    for index in range(request.sampling.n)
                },
            )
            self._inbox.append(request)
            self._changed.notify()

    def abort(self, request_id: str) -> None:
        """End a request: its last delta says "abort", unless it finished first. Unknown ids are ignored."""
        with self._changed:
            if request_id in self._consumers:
                self._inbox.append(request_id)
                self._changed.notify()

    def reset_cache(self) -> Future[bool]:
        """Forget every cached prefix, between two steps; the result is False, with nothing changed, while requests hold
        blocks. The future fails with EngineClosedError if the service ends first."""
        errand = _Errand(self._engine.manager.reset, Future())
        with self._changed:
            if self._crash is not None or self._is_closing:
                errand.future.set_exception(EngineClosedError("the engine is closed"))
            else:
                self._inbox.append(errand)
                self._changed.notify()
        return errand.future

    def stats(self) -> EngineStats:
        """Return the engine's counters as they stand."""
        return self._engine.stats()

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests; abort those that are live, or with `drain` let them finish; end the thread.

        Idempotent; a second call without `drain` cuts a draining one short. Called from `on_delta` it does not wait.
        """
        with self._changed:
            self._is_draining = drain and (self._is_draining or not self._is_closing)
            self._is_closing = True
            self._changed.notify()
            if self._thread.ident is None:  # never started, but requests may be waiting for their last delta
                self._thread.start()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- on the service's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                started = self._clock()
                deltas = self._engine.step()
                if self._observer is not None:
                    self._observer.stepped(started, self._clock(), self._engine, deltas)
                if self._on_events is not None and (events := self._engine.take_events()):
                    self._on_events(events)
                for delta in deltas:
                    self._deliver(delta)
        except BaseException as error:
            _logger.exception("the engine has crashed")
            with self._changed:
                self._crash = error
                inbox, self._inbox = self._inbox, deque()
                live = list(self._consumers)
            for item in inbox:
                if isinstance(item, _Errand):
                    item.future.set_exception(EngineClosedError("the engine has crashed"))
            for request_id in live:
                self._fail(request_id, error)
        finally:
            self._busy_since = None

    def _read_inbox(self) -> bool:
        """Wait for something to do, tell the engine what callers left; return False when it is time to end."""
        with self._changed:
            self._busy_since = None
            while not (self._inbox or self._is_closing or self._engine.has_work):
                self._changed.wait()
            self._busy_since = self._clock()
            inbox, self._inbox = self._inbox, deque()
            is_closing = self._is_closing
            is_draining = self._is_draining
            live = list(self._consumers)
        for item in inbox:
            if isinstance(item, str):
                self._abort(item)
            elif isinstance(item, _Errand):
                item.run()
            else:
                self._start_request(item)
        if is_closing and not is_draining:
            for request_id in live:
                self._abort(request_id)
        return self._engine.has_work or not is_closing

    def _start_request(self, request: Request) -> None:
        try:
            self._engine.submit(request)
            if self._observer is not None:
                self._observer.submitted(request)
        except Exception as error:  # a value of a type that `validate` did not expect: this request's fault alone
            _logger.exception("request %r could not be started", request.request_id)
            self._fail(request.request_id, error)

    def _abort(self, request_id: str) -> None:
        for delta in self._engine.abort(request_id):
            self._deliver(delta)

    def _fail(self, request_id: str, error: BaseException) -> None:
        description = f"{type(error).__name__}: {error}"
        for last in list(self._consumers[request_id].last.values()):
            self._deliver(replace(last, token_ids=(), text="", logprobs=(), finish_reason="error", error=description))

    def _deliver(self, delta: Delta) -> None:
        consumer = self._consumers.get(delta.request_id)
        if consumer is None:
            return
        consumer.last[delta.index] = delta
        if self._observer is not None and delta.finish_reason is not None:
            self._observer.ended(delta)
        if delta.finish_reason is not None:
            del consumer.last[delta.index]
            if not consumer.last:
                self._forget(delta.request_id)
        try:
            consumer.on_delta(delta)
        except Exception:
            _logger.exception("request %r is aborted: its consumer failed", delta.request_id)
            if consumer.last:
                self._forget(delta.request_id)
                self._engine.abort(delta.request_id)

    def _forget(self, request_id: str) -> None:
        with self._changed:
            self._consumers.pop(request_id, None)

"""The engine requests of one API call, as one stream of deltas on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from anaphora.engine.request import RequestError
from anaphora.server.errors import deadline_passed, internal_error, shutting_down
from anaphora.server.logs import log_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.types import Receive

    from anaphora.engine.request import Delta, Request
    from anaphora.engine.service import EngineService
    from anaphora.server.metrics import Metrics, RequestTimer

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """The engine refused request number `index`."""

    def __init__(self, index: int, error: RequestError) -> None:
        super().__init__(str(error))
        self.index = index
        self.error = error


class Generations:
    """Those that are going on in one server."""

    def __init__(self, service: EngineService, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._live: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._live)

    def submit(self, requests: Sequence[Request], started: float) -> Generation:
        """Hand all requests to the engine, or none. `started`: when the client's call arrived, by the metrics' clock.

        Raises:
            RefusedError: the engine refuses one of them.
        """
        generation = Generation(self._service, requests, self._live, started, self._metrics.clock)
        generation.submit(lambda: self._metrics.start_request(started))
        return generation

    def interrupt(self) -> None:
        """End all of them, because the server stops."""
        for generation in list(self._live):
            generation.end_with(shutting_down())


class Generation:
    """Submits requests to the engine and yields (choice, delta) in the order in which they came.

    A choice is a sample of a request; they are numbered request by request.

    The engine calls back on its own thread; from there on all happens on the event loop. Whatever way it ends (all
    finished, the client went away, the server stops, the caller was cancelled), no request stays in the engine.
    """

    def __init__(
        self,
        service: EngineService,
        requests: Sequence[Request],
        live: set[Generation],
        started: float,
        clock: Callable[[], float],
    ) -> None:
        """`live`: where it stands while it goes on. started: when the client's call arrived, by `clock`."""
        self._service = service
        self._requests = requests
        self._live = live
        self._started = started
        self._clock = clock
        self._first_token_s: float | None = None
        self._last: dict[int, Delta] = {}
        """By choice, what came of it last."""
        self._choices: list[Request] = []
        self._unfinished: dict[int, RequestTimer] = {}
        self._arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    def submit(self, start_timer: Callable[[], RequestTimer]) -> None:
        """See Generations.submit."""
        loop = asyncio.get_running_loop()
        self._live.add(self)
        for index, request in enumerate(self._requests):
            first = len(self._choices)
            try:
                self._service.submit(request, self._callback(loop, first))
            except RequestError as error:
                self.abort()
                raise RefusedError(index, error) from None
            except BaseException:
                self.abort()
                raise
            for _ in range(request.sampling.n):
                self._unfinished[len(self._choices)] = start_timer()
                self._choices.append(request)

    @contextlib.asynccontextmanager
    async def watch(self, receive: Receive) -> AsyncIterator[None]:
        """While in the context, a client that goes away ends the stream with ClientDisconnect."""
        watcher = asyncio.create_task(self._wait_for_disconnect(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.abort()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield until every request has had its last delta.

        Raises:
            ApiError: the engine failed or the server stops.
            ClientDisconnect: nobody listens any more.
        """
        num_open = len(self._choices)
        while num_open:
            item = await self._arrived.get()
            if isinstance(item, Exception):
                raise item
            choice, delta = item
            if delta.finish_reason == "error":
                logger.error("Request %s failed: %s", delta.request_id, delta.error)
                raise internal_error()
            if delta.finish_reason == "abort":
                # The engine gives a reason where it ended the request itself.
                raise deadline_passed() if delta.error else shutting_down()
            num_open -= delta.finish_reason is not None
            yield choice, delta

    def end_with(self, error: Exception) -> None:
        """Take what is unfinished out of the engine and end the stream with an error."""
        self.abort()
        self._arrived.put_nowait(error)

    def abort(self) -> None:
        """Take what is unfinished out of the engine. Idempotent."""
        was_live = self in self._live
        self._live.discard(self)
        unfinished, self._unfinished = self._unfinished, {}
        for request_id in {self._choices[choice].request_id for choice in unfinished}:
            self._service.abort(request_id)
        for timer in unfinished.values():
            timer.finish("abort")
        if was_live and self._choices:
            self._log()

    def _log(self) -> None:
        firsts = {delta.request_id: delta for delta in self._last.values()}.values()
        ttft_s = self._first_token_s
        log_request(
            id=self._choices[0].request_id.rpartition("-")[0],
            prompt_tokens=sum(delta.num_prompt_tokens for delta in firsts),
            cached_tokens=sum(delta.num_cached_tokens for delta in firsts),
            output_tokens=sum(delta.num_output_tokens for delta in self._last.values()),
            finish_reasons=[
                (self._last[choice].finish_reason or "abort") if choice in self._last else "abort"
                for choice in range(len(self._choices))
            ],
            ttft_s=None if ttft_s is None else round(ttft_s, 6),
            duration_s=round(self._clock() - self._started, 6),
        )

    def _callback(self, loop: asyncio.AbstractEventLoop, first: int) -> Callable[[Delta], None]:
        def on_delta(delta: Delta) -> None:
            loop.call_soon_threadsafe(self._take, first + delta.index, delta)

        return on_delta

    def _take(self, choice: int, delta: Delta) -> None:
        timer = self._unfinished.get(choice)
        if timer is None:  # aborted meanwhile
            return
        timer.observe(delta)
        self._last[choice] = delta
        if delta.token_ids and self._first_token_s is None:
            self._first_token_s = self._clock() - self._started
        if delta.finish_reason is not None:
            timer.finish(delta.finish_reason)
            del self._unfinished[choice]
        self._arrived.put_nowait((choice, delta))

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end_with(ClientDisconnect())

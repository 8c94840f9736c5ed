"""Runs an app: the socket, uvicorn, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, Literal, Protocol

import uvicorn

from anaphora.server.protocol import ApiProtocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SHUTDOWN_GRACE_S = 5.0
"""How long requests may go on once the server was told to stop, and nothing else was said."""

_FLUSH_S = 0.5
"""How long the last words of interrupted requests may take to leave."""
_POLL_S = 0.05
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx: 5 s), so that none is closed just as it is used again."""


class ListenError(Exception):
    """The address cannot be listened on; the message is one line that says why."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket; port 0 takes a free one.

    Before anything slow, so that a port in use is known at once.

    Raises:
        ListenError: the port is taken, needs other rights, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise _listen_error(host, port, error) from None
    return sock


def _listen_error(host: str, port: int, error: OSError) -> ListenError:
    if error.errno == errno.EADDRINUSE:
        return ListenError(f"port {port} on {host} is in use; choose another with --port")
    return ListenError(f"cannot listen on {host}, port {port}: {error.strerror or error}")


def url_of(sock: socket.socket) -> str:
    """The URL by which this machine reaches the server."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _InProgress(Protocol):
    def __len__(self) -> int: ...

    def interrupt(self) -> None: ...


class Api(Protocol):
    """What a Server serves: an ASGI application, and its requests that are going on."""

    @property
    def app(self) -> Any:
        """The application."""
        ...

    @property
    def generations(self) -> _InProgress:
        """Requests that are going on: how many, and an end to all of them."""
        ...


class Server(uvicorn.Server):
    """Serves one Api until it is told to stop, by a signal or by `stop`.

    Requests that are going on then have `grace_s` to finish (SHUTDOWN_GRACE_S by default); at the second signal, or
    after that time, they end with an error. A third signal leaves at once.
    on_started: called on the event loop once connections are accepted.
    on_draining: called on the event loop when it was told to stop. With it, connections are accepted until the last
        request has finished, so that new ones can be told to go elsewhere; without it none are from then on.
    on_waiting: called with the number of requests that are going on, where the end has to wait for them.
    http: the protocol class of a connection. loop: the event loop, by uvicorn's name for it.
    dates: whether answers get a `date`; not where they bring their own.
    """

    def __init__(
        self,
        api: Api,
        *,
        on_started: Callable[[], None] | None = None,
        on_draining: Callable[[], None] | None = None,
        on_waiting: Callable[[int], None] | None = None,
        grace_s: float | None = None,
        http: type[asyncio.Protocol] = ApiProtocol,
        loop: Literal["asyncio", "auto"] = "asyncio",
        dates: bool = True,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                api.app,
                http=http,
                loop=loop,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=dates,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._api = api
        self._on_started = on_started
        self._on_draining = on_draining
        self._on_waiting = on_waiting
        self._grace_s = grace_s
        self._num_signals = 0
        self._is_told_to_stop = False
        self._deadline: float | None = None
        """When requests that are going on are ended, once it was told to stop."""

    def stop(self) -> None:
        """Stop serving; may be called from any thread."""
        self._is_told_to_stop = True
        if self._on_draining is None:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Extends uvicorn's, which looks ten times a second whether to end."""
        if self._is_told_to_stop and not self.should_exit:
            deadline = self._begin_to_stop()
            self.should_exit = not self._api.generations or self._now() >= deadline or self._num_signals > 1
        return await super().on_tick(counter)

    def _begin_to_stop(self) -> float:
        """Return when requests that are going on are ended; what is to be done first is done once."""
        if self._deadline is None:
            self._deadline = self._now() + (SHUTDOWN_GRACE_S if self._grace_s is None else self._grace_s)
            if self._on_draining is not None:
                self._on_draining()
            if self._api.generations and self._on_waiting is not None and self._num_signals < 2:
                self._on_waiting(len(self._api.generations))
        return self._deadline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Extends uvicorn's.

        Raises:
            ListenError: another process took the port between `bind` and now.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            await self.lifespan.shutdown()
            host, port = sockets[0].getsockname()[:2] if sockets else (self.config.host, self.config.port)
            raise _listen_error(host, port, error) from None
        if self._on_started is not None and self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Extends uvicorn's, which waits for connections to end, for ever if need be."""
        interruption = asyncio.create_task(self._interrupt_after_grace())
        try:
            await super().shutdown(sockets)
        finally:
            interruption.cancel()

    async def _interrupt_after_grace(self) -> None:
        connections = self.server_state.connections
        deadline = min(self._begin_to_stop(), self._now() + SHUTDOWN_GRACE_S)
        while (self._api.generations or connections) and self._now() < deadline and self._num_signals < 2:
            await asyncio.sleep(_POLL_S)
        self._api.generations.interrupt()
        deadline = self._now() + _FLUSH_S
        while connections and self._now() < deadline:
            await asyncio.sleep(_POLL_S)
        # Whoever has not sent its request yet, or does not read its answer, would be waited for without an end.
        for connection in list(connections):
            transport = connection.transport
            if transport is not None:
                transport.abort()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which raises the signals again at the end: an orderly end is a success here."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self._num_signals += 1
        self.stop()
        self.force_exit = self._num_signals > 2

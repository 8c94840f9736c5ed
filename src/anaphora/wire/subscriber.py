"""EventSubscriber: follows the KV events of many publishers over ZMQ, on a thread that does nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from anaphora.wire.decoder import WireError
from anaphora.wire.frames import SEQUENCE_BYTES, Frames
from anaphora.wire.sequence import AskReplay, EventSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.wire.sequence import Action

_POLL_MS = 50
_REPLAY_TIMEOUT_S = 5.0
_MAX_QUEUED = 100_000
DEFAULT_CHECK_S = 10.0

# What stands in the queue besides messages, in its place among them.
_DOUBT: list[bytes] = [b"doubt"]
_ASKED: list[bytes] = [b"asked"]


@dataclass(slots=True)
class _Source:
    key: str
    endpoint: str
    replay_endpoint: str | None
    topic: str
    socket: zmq.Socket[bytes] | None = None
    replay: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[bytes] | None = None
    is_cut: bool = False
    is_known: bool = False
    """Whether there was a connection before."""
    heard: float = 0.0
    round: int = 0
    """Which AskReplay is the last one; answers to earlier ones count no more."""
    answering: int = 0
    replay_deadline: float = 0.0
    sequence: EventSequence = field(default_factory=EventSequence)


class EventSubscriber:
    """Subscribes to publishers of vLLM's form, each under a key of the caller's.

    The thread only moves messages from sockets to a queue, so that no engine ever waits for a reader; reading them is
    the caller's, with `take`. Batches that do not fit into the queue are dropped, which the sequence then notices.

    on_ready: called from the thread when the queue has something, once until the next `take`.
    check_s: a publisher that is silent for so many seconds is asked whether that is so: the last messages before a
        silence are lost without a sign.
    """

    def __init__(self, on_ready: Callable[[], object], *, check_s: float = DEFAULT_CHECK_S) -> None:
        self._on_ready = on_ready
        self._check_s = check_s
        self._context = zmq.Context()
        self._queue: deque[tuple[_Source, list[bytes] | None, int | None]] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._sources: dict[str, _Source] = {}
        self._is_told = False
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="anaphora-kv-events", daemon=True)
        self._poller = zmq.Poller()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close every socket."""
        self._stops = True
        if self._thread.is_alive():
            self._thread.join()
        self._context.destroy(linger=0)

    def add(self, key: str, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Follow a publisher. Both endpoints are addresses to connect to, tcp://10.0.0.5:5557.

        Raises ValueError for what is no endpoint.
        """
        for name, value in (("endpoint", endpoint), ("replay_endpoint", replay_endpoint)):
            if value is not None and not value.startswith(("tcp://", "ipc://", "inproc://")):
                raise ValueError(f"{name}: expected tcp://HOST:PORT or ipc://PATH, got {value[:100]!r}")
        source = self._sources[key] = _Source(key, endpoint, replay_endpoint, topic)
        source.sequence.start()
        self._orders.append(lambda: self._open(source))

    def remove(self, key: str) -> None:
        """Follow it no longer."""
        source = self._sources.pop(key, None)
        if source is not None:
            self._orders.append(lambda: self._shut(source))

    def resync(self, key: str) -> None:
        """Forget where the publisher was, and ask for all that it still has."""
        source = self._sources.get(key)
        if source is not None:
            self._do(source, source.sequence.start())

    def is_settled(self, key: str) -> bool:
        """Whether the publisher is there, nothing is being asked for, and all that came was taken. Call it from the
        thread that calls `take`."""
        source = self._sources.get(key)
        return source is not None and not (source.is_cut or source.sequence.is_asking or self._queue)

    def take(self, max_messages: int = 1000) -> list[tuple[str, Action]]:
        """Return what happened, by key, in order; [] if nothing is left. Call it from one thread."""
        self._is_told = False
        actions: list[tuple[str, Action]] = []
        for _ in range(max_messages):
            if not self._queue:
                break
            source, parts, asked = self._queue.popleft()
            if self._sources.get(source.key) is not source or asked not in {None, source.round}:
                continue
            sequence = source.sequence
            if parts is None:
                new = sequence.end_replay()
            elif parts is _DOUBT:
                new = sequence.reconnected()
            elif parts is _ASKED:
                sequence.asked()
                continue
            else:
                try:
                    frames = Frames.from_parts(parts)
                except WireError:
                    continue  # no message of ours; a batch that is missed for it will show
                new = sequence.live(frames) if asked is None else sequence.replayed(frames)
            actions += [(source.key, action) for action in new if not isinstance(action, AskReplay)]
            self._do(source, new)
        if self._queue:
            self._tell()
        return actions

    def _do(self, source: _Source, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, AskReplay):
                source.round += 1
                self._order_replay(source, action.first, source.round)

    def _order_replay(self, source: _Source, first: int, asked: int) -> None:
        self._orders.append(lambda: self._ask(source, first, asked))

    # On the thread

    def _run(self) -> None:
        while not self._stops:
            while self._orders:
                self._orders.popleft()()
            for socket, _ in self._poller.poll(_POLL_MS):
                self._drain(socket)
            now = time.monotonic()
            for source in list(self._sources.values()):
                if source.replay is not None and now > source.replay_deadline:
                    self._close_replay(source)
                    self._put(source, None, source.answering)
                is_silent = now - source.heard > self._check_s and source.replay is None and not source.is_cut
                if is_silent and source.socket is not None and source.replay_endpoint is not None:
                    source.heard = now
                    self._put(source, _DOUBT, None)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        source = next((s for s in list(self._sources.values()) if socket in {s.socket, s.replay, s.monitor}), None)
        if source is None:
            return
        if socket is source.monitor:
            self._watch(source)
            return
        source.heard = time.monotonic()
        if socket is source.socket:
            self._drain_live(source, socket)
            return
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            source.replay_deadline = time.monotonic() + _REPLAY_TIMEOUT_S
            self._put(source, parts, source.answering)
            if len(parts) > 2 and not parts[-1] and parts[-2] == b"\xff" * SEQUENCE_BYTES:
                self._close_replay(source)
                return

    def _drain_live(self, source: _Source, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._watch(source)  # before it: a message of the next connection comes after the word of that
            self._put(source, parts, None)

    def _watch(self, source: _Source) -> None:
        assert source.monitor is not None
        while source.monitor.poll(0):
            event = parse_monitor_message(source.monitor.recv_multipart())["event"]
            source.is_cut = event == zmq.EVENT_DISCONNECTED
            # At the first connection too: what was sent between the first replay and it came to nobody.
            if not source.is_cut and (source.is_known or source.replay_endpoint is not None):
                self._put(source, _DOUBT, None)
            source.is_known = True

    def _put(self, source: _Source, parts: list[bytes] | None, asked: int | None) -> None:
        is_live = parts is not None and len(parts) > 1 and asked is None
        if len(self._queue) < _MAX_QUEUED or not is_live:
            self._queue.append((source, parts, asked))
        self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._on_ready()

    def _open(self, source: _Source) -> None:
        source.heard = time.monotonic()
        source.socket = self._context.socket(zmq.SUB)
        source.socket.set_hwm(_MAX_QUEUED)
        source.socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        source.monitor = source.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        with contextlib.suppress(zmq.ZMQError):
            source.socket.connect(source.endpoint)
        self._poller.register(source.socket, zmq.POLLIN)
        self._poller.register(source.monitor, zmq.POLLIN)
        self._ask(source, 0, source.round)

    def _shut(self, source: _Source) -> None:
        self._close_replay(source)
        if source.socket is not None:
            self._poller.unregister(source.socket)
            self._poller.unregister(source.monitor)
            source.socket.disable_monitor()
            source.socket.close(linger=0)
            source.socket = None

    def _ask(self, source: _Source, first: int, asked: int) -> None:
        self._close_replay(source)
        source.answering = asked
        if source.replay_endpoint is None:
            self._put(source, None, asked)
            return
        if source.socket is not None:
            self._drain_live(source, source.socket)
        self._put(source, _ASKED, asked)
        socket = source.replay = self._context.socket(zmq.DEALER)
        socket.set_hwm(_MAX_QUEUED)
        with contextlib.suppress(zmq.ZMQError):
            socket.connect(source.replay_endpoint)
        self._poller.register(socket, zmq.POLLIN)
        with contextlib.suppress(zmq.ZMQError):
            socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)
        source.replay_deadline = time.monotonic() + _REPLAY_TIMEOUT_S

    def _close_replay(self, source: _Source) -> None:
        if source.replay is not None:
            self._poller.unregister(source.replay)
            source.replay.close(linger=0)
            source.replay = None

"""EventPublisher: KV events on ZMQ, as vLLM 0.32 sends them, without ever holding up the engine."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from anaphora.wire.frames import END_OF_REPLAY, SEQUENCE_BYTES, EndpointError, Frames
from anaphora.wire.vllm_codec import VllmEventFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from anaphora.cache.events import Event

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
DEFAULT_BUFFER_STEPS = 10_000
DEFAULT_BUFFER_BYTES = 64 * 2**20
DEFAULT_QUEUE_SIZE = 10_000
SEND_HWM = 100_000
REPLAY_HWM = 1_000
MAX_REPLAYS = 16
"""Replays that are sent side by side; when more are asked for, the oldest gets no more."""

_CLOSE_S = 1.0
"""How long the end may take for what is still to be sent."""
_REPLAY_SLICE = 200
"""Replayed batches between two looks at what is new."""
_REPLAY_POLL_MS = 5

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PublisherStats:
    """Counters since the start, in batches; num_queued is of now.

    num_dropped: those that were lost because the queue was full, or because they have no form on the wire.
    """

    num_published: int = 0
    num_dropped: int = 0
    num_replays: int = 0
    num_queued: int = 0


class EventPublisher:
    """Sends batches of events to whoever subscribes, from a thread of its own.

    `publish` gives a batch its number and returns at once. If the queue is full the batch is dropped: its number is
    missing then for every subscriber, and an empty batch follows as soon as there is room, so that they see it even if
    nothing else happens.

    endpoint: of the PUB socket. replay_endpoint: of the ROUTER socket that sends batches again; None for none.
    connects: connect the PUB socket to a subscriber that binds, and do not bind. (vLLM decides so by the look of the
        endpoint; here it is always said.)
    encode: makes a payload of events and their time in Unix seconds: `VllmEventFormat().encode` (the default),
        `AnaphoraCodec(key).encode`. A ValueError drops the batch.
    buffer_steps, buffer_bytes: the last so many batches, of at most so many bytes, can be replayed.
    queue_size: batches that may wait to be sent.
    clock: Unix seconds.

    Raises:
        EndpointError: an endpoint is malformed, in use, or no address of this machine.
        ValueError: a size below 1.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        replay_endpoint: str | None = None,
        *,
        encode: Callable[[Sequence[Event], float], bytes] | None = None,
        connects: bool = False,
        topic: str = "",
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        buffer_bytes: int = DEFAULT_BUFFER_BYTES,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, size in (
            ("buffer_steps", buffer_steps),
            ("buffer_bytes", buffer_bytes),
            ("queue_size", queue_size),
        ):
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        self._encode = encode or VllmEventFormat().encode
        self._topic = topic
        self._buffer_steps = buffer_steps
        self._buffer_bytes = buffer_bytes
        self._queue_size = queue_size
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the next three; nobody holds it for longer than a few instructions."""
        self._next = 0
        self._has_unseen_gap = False
        self._queue: deque[tuple[int, float, Sequence[Event] | bytes]] = deque()
        self._stats = PublisherStats()
        self._buffer: deque[Frames] = deque()
        self._num_buffered_bytes = 0
        self._replays: deque[tuple[bytes, deque[Frames]]] = deque()
        """Answers on their way: to whom, and what is left to be sent."""
        self._is_closing = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, endpoint, connects=connects)
            self._router = None if replay_endpoint is None else self._open(zmq.ROUTER, replay_endpoint)
        except BaseException:
            self._release()
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where it sends; a port that was left to the system is named."""
        self.replay_endpoint = None if self._router is None else self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="anaphora-kv-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def port(self) -> int | None:
        """The TCP port of `endpoint`."""
        return _port(self.endpoint)

    @property
    def replay_port(self) -> int | None:
        """The TCP port of `replay_endpoint`."""
        return None if self.replay_endpoint is None else _port(self.replay_endpoint)

    def publish(self, batch: Sequence[Event] | bytes) -> None:
        """Queue one batch, nothing if it is empty; bytes are one that is encoded already. Called from one thread only.

        Cost: some microseconds; it is encoded on the publisher's thread.
        """
        if not batch:
            return
        with self._lock:
            sequence = self._next
            self._next += 1
            self._has_unseen_gap = len(self._queue) >= self._queue_size
            if self._has_unseen_gap:
                self._stats.num_dropped += 1
                return
            self._queue.append((sequence, self._clock(), batch))
        self._wake()

    def stats(self) -> PublisherStats:
        """Return the counters as they stand. May be called from any thread."""
        stats = self._stats
        return PublisherStats(stats.num_published, stats.num_dropped, stats.num_replays, len(self._queue))

    def close(self) -> None:
        """Send what is queued, for at most a second; then close the sockets. Idempotent."""
        self._is_closing = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._wake_out.send(b"\0")

    def _open(self, kind: int, endpoint: str, *, connects: bool = False) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.SNDHWM, SEND_HWM if kind == zmq.PUB else REPLAY_HWM)
        if kind == zmq.ROUTER:
            opened.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so where a client reads slowly or is gone
        opened.setsockopt(zmq.LINGER, int(1000 * _CLOSE_S))
        if "[" in endpoint or "::" in endpoint:
            opened.setsockopt(zmq.IPV6, 1)
        try:
            if connects:
                opened.connect(endpoint)
            else:
                opened.bind(f"{endpoint[:-1]}*" if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            raise EndpointError(f"{endpoint}: {zmq.strerror(error.errno or 0)}") from None
        return opened

    # -- on the publisher's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            while not (self._is_closing and not self._queue):
                self._turn(poller)
        except Exception:
            logger.exception("KV events are not published any more")
        finally:
            self._release()

    def _turn(self, poller: zmq.Poller) -> None:
        # An answer may wait for a slow client, of whom nothing wakes us.
        ready = dict(poller.poll(_REPLAY_POLL_MS if self._replays else None))
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        while (batch := self._take()) is not None:
            self._send(*batch)
        if self._router is not None:
            if self._router in ready:
                self._note_request(self._router)
            for _ in range(len(self._replays)):
                self._go_on_with_replay(self._router)

    def _take(self) -> tuple[int, float, Sequence[Event] | bytes] | None:
        """The next batch to be sent; one without events where the last ones were dropped and nothing came after."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if not self._has_unseen_gap:
                return None
            self._has_unseen_gap = False
            sequence = self._next
            self._next += 1
        return sequence, self._clock(), ()

    def _send(self, sequence: int, ts: float, batch: Sequence[Event] | bytes) -> None:
        try:
            payload = batch if isinstance(batch, bytes) else self._encode(batch, ts)
        except ValueError as error:
            logger.warning("A batch of KV events has no form on the wire: %s", error)
            with self._lock:
                self._stats.num_dropped += 1
                self._has_unseen_gap = True
            return
        frames = Frames(self._topic, sequence, payload)
        self._buffer.append(frames)
        self._num_buffered_bytes += len(payload)
        while len(self._buffer) > self._buffer_steps or self._num_buffered_bytes > self._buffer_bytes:
            self._num_buffered_bytes -= len(self._buffer.popleft().payload)
        with contextlib.suppress(zmq.Again):  # a PUB socket drops for slow subscribers, but never waits
            self._pub.send_multipart(frames.parts(), zmq.NOBLOCK)
        self._stats.num_published += 1

    def _note_request(self, router: zmq.Socket[bytes]) -> None:
        """Whoever asks in another form gets no answer, as with vLLM."""
        while router.poll(0):
            parts = router.recv_multipart()
            if len(parts) == 3 and not parts[1] and len(parts[2]) == SEQUENCE_BYTES:
                start = int.from_bytes(parts[2], "big")
                self._replays.append((parts[0], deque(f for f in self._buffer if f.sequence >= start)))
                self._stats.num_replays += 1
                if len(self._replays) > MAX_REPLAYS:
                    self._replays.popleft()

    def _go_on_with_replay(self, router: zmq.Socket[bytes]) -> None:
        client, batches = self._replays.popleft()
        try:
            for _ in range(min(_REPLAY_SLICE, len(batches))):
                router.send_multipart([client, b"", *batches[0].parts()], zmq.NOBLOCK)
                batches.popleft()
            if not batches:
                router.send_multipart([client, b"", *END_OF_REPLAY.parts()], zmq.NOBLOCK)
                return
        except zmq.Again:  # it reads slowly
            pass
        except zmq.ZMQError:  # it is gone
            return
        self._replays.append((client, batches))

    def _release(self) -> None:
        self._context.destroy(linger=int(1000 * _CLOSE_S))
        self._wake_out.close()
        self._wake_in.close()


def _port(endpoint: str) -> int | None:
    port = endpoint.rpartition(":")[2]
    return int(port) if port.isdecimal() else None

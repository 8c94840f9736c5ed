"""EventPublisher: KV events over ZMQ as vLLM's publisher sends them, with a replay of the last batches."""

from __future__ import annotations

import threading
from collections import deque

import zmq

from anaphora.wire.frames import SEQUENCE_BYTES, Frames

DEFAULT_BUFFER_STEPS = 10_000
_POLL_MS = 50


class EventPublisher:
    """Binds a PUB socket, and a ROUTER socket where batches are asked for again.

    `publish` never waits: batches go through a queue to a thread, and a reader that is too slow loses some, which the
    sequence numbers show.

    endpoint, replay_endpoint: addresses to bind, tcp://*:5557; port 0 takes a free one (see `port`, `replay_port`).
    buffer_steps: batches that can be replayed.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        buffer_steps: int = DEFAULT_BUFFER_STEPS,
        high_water_mark: int = 100_000,
    ) -> None:
        self._topic = topic
        self._buffer: deque[Frames] = deque(maxlen=buffer_steps)
        self._new: deque[bytes] = deque()
        self._next = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(high_water_mark)
        self.port = _bind(self._socket, endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_port: int | None = None
        if replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self.replay_port = _bind(self._replay, replay_endpoint)
        self._wakes, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wakes.bind("inproc://wake")
        self._woken.connect("inproc://wake")
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="anaphora-kv-publisher", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        """Send one encoded batch (`VllmEventFormat.encode`). Call it from one thread."""
        self._new.append(payload)
        self._wakes.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, and close."""
        self._stops = True
        self._wakes.send(b"")
        self._thread.join()
        self._wakes.close(linger=0)
        self._context.destroy(linger=200)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._stops or self._new:
            for socket, _ in poller.poll(_POLL_MS):
                if socket is self._woken:
                    self._woken.recv()
                else:
                    self._answer()
            while self._new:
                frames = Frames(self._topic, self._next, self._new.popleft())
                self._next += 1
                self._buffer.append(frames)
                self._socket.send_multipart(frames.parts())
        self._woken.close(linger=0)

    def _answer(self) -> None:
        assert self._replay is not None
        parts = self._replay.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != SEQUENCE_BYTES:
            return
        first = int.from_bytes(parts[2], "big")
        for frames in self._buffer:
            if frames.sequence >= first:
                self._replay.send_multipart([parts[0], b"", *frames.parts()])
        self._replay.send_multipart([parts[0], b"", b"", b"\xff" * SEQUENCE_BYTES, b""])


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> int | None:
    """Bind; return the port, None for what has none. Raises ValueError, with the reason."""
    try:
        socket.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{endpoint}: {error.strerror}") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    port = bound.rstrip(b"\0").rpartition(b":")[2]
    return int(port) if port.isdigit() else None

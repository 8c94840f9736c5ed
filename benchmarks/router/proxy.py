"""What a proxy costs: CPU time a request and a streamed chunk, in front of workers that answer at once.

python -m benchmarks.router.proxy [--requests 1000] [--rounds 3] [--peer NAME COMMAND]

A peer is any other router: COMMAND starts it on {port} in front of {urls} (two of them). All contestants are measured
in turn, round by round, with the same requests. CPU time is that of all of a router's processes and threads, divided by
the requests that it passed on; given is the round's median. Latency is the client's, one request after another, and
means little on a busy machine. A streamed chunk is what a stream of 200 costs beyond a plain answer, divided by 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from statistics import median

USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
ANSWER = json.dumps(
    {"id": "c", "object": "chat.completion", "model": "m", "choices": [CHOICE], "usage": USAGE}
).encode()
CHUNK_TEXT = json.dumps(
    {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": {"content": "x"}}]}
)
CHUNK = f"data: {CHUNK_TEXT}\n\n".encode()
NUM_CHUNKS = 200
CHUNK_GAP_S = 0.001
MODELS = b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x", "created": 1}]}'
WORKER_PORTS = (8971, 8972)
FIRST_PORT = 8980


class Worker(asyncio.Protocol):
    """Answers at once; streams in chunks that come apart."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if b"transfer-encoding: chunked" in lines:  # as Envoy sends what its picker has looked at
            if not body.endswith(b"\r\n0\r\n\r\n"):
                return
            length = len(body)
        if len(body) < length:
            return
        self._data = body[length:]
        if not head.startswith(b"POST"):
            self._answer(MODELS)
        elif b'"stream": true' in body or b'"stream":true' in body:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self._stream(NUM_CHUNKS)
        else:
            self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _stream(self, left: int) -> None:
        if self._transport.is_closing():
            return
        text = CHUNK if left else b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(text), text) + (b"" if left else b"0\r\n\r\n"))
        if left:
            asyncio.get_running_loop().call_later(CHUNK_GAP_S, self._stream, left - 1)


async def work(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Worker, "127.0.0.1", port)
    await server.serve_forever()


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, body: bytes) -> float:
        """Post a chat completion; return the seconds until all of the answer was there."""
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        started = time.perf_counter()
        self._socket.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        data = b""
        while True:
            part = self._socket.recv(1 << 16)
            if not part:
                raise ConnectionError(f"broken off after {data[:500]!r}")
            data += part
            head, separator, answer = data.partition(b"\r\n\r\n")
            if not separator:
                continue
            if not head.startswith(b"HTTP/1.1 200"):
                raise ConnectionError(f"answered {data[:500]!r}")
            lowered = head.lower()
            if b"chunked" in lowered:
                if answer.endswith(b"0\r\n\r\n"):
                    break
            elif len(answer) >= int(lowered.partition(b"content-length:")[2].split()[0]):
                break
        return time.perf_counter() - started


def body_of(i: int, num_bytes: int, *, stream: bool = False) -> bytes:
    """A chat whose first half all share, and whose second is its own."""
    half = num_bytes // 2
    text = f"{i:08d} some words of a question ".ljust(half, "b")
    messages = [{"role": "system", "content": "a" * half}, {"role": "user", "content": text}]
    return json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()


def cpu_s(pid: int) -> float:
    """User and system time of a process and of all that it started."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return own + sum(cpu_s(int(child)) for child in file.read().split())


@dataclass
class Contestant:
    """A router, or a worker without one (pid None)."""

    name: str
    port: int
    pid: int | None
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    wall_us: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, what: str, bodies: list[bytes], num_clients: int) -> None:
        """Post all of the bodies, by so many clients at once, and note what it cost."""
        clients = [Client(self.port) for _ in range(num_clients)]
        times: list[float] = []

        def drive(i: int) -> None:
            times.extend(clients[i].post(body) for body in bodies[i::num_clients])

        before = cpu_s(self.pid) if self.pid else 0.0
        threads = [threading.Thread(target=drive, args=(i,)) for i in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(times) == len(bodies), f"{self.name}: answers are missing"
        if self.pid:
            self.cpu_us.setdefault(what, []).append((cpu_s(self.pid) - before) / len(bodies) * 1e6)
        self.wall_us.setdefault(what, []).append(median(times) * 1e6)


def wait_until_up(port: int, timeout_s: float = 60) -> None:
    """Wait until a chat completion is answered."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            Client(port).post(body_of(0, 100))
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.3)


def main() -> None:
    """Start workers and routers, and measure them in turn."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.proxy")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bytes", type=int, nargs="+", default=[2000, 32_000])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        asyncio.run(work(args.worker))
        return
    urls = [f"http://127.0.0.1:{port}" for port in WORKER_PORTS]
    own = f"{sys.executable} -m anaphora.cli route --port {{port}} " + " ".join(f"--replica {url}" for url in urls)
    processes = [
        subprocess.Popen([sys.executable, "-m", "benchmarks.router.proxy", "--worker", str(port)])
        for port in WORKER_PORTS
    ]
    contestants = [Contestant("no router", WORKER_PORTS[0], None)]
    try:
        for i, (name, command) in enumerate([("Anaphora", own), *args.peer]):
            words = shlex.split(command.format(port=FIRST_PORT + i, urls=" ".join(urls)))
            processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            contestants.append(Contestant(name, FIRST_PORT + i, processes[-1].pid))
        for contestant in contestants:
            wait_until_up(contestant.port)
        run(contestants, args)
    finally:
        for process in processes:
            process.terminate()
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")


def run(contestants: list[Contestant], args: argparse.Namespace) -> None:
    """Measure all, round by round, and print the table."""
    number = 0
    for _ in range(args.rounds):
        for num_bytes in args.bytes:
            for num_clients in args.clients:
                bodies = [body_of(number + i, num_bytes) for i in range(args.requests)]
                number += args.requests
                for contestant in contestants:
                    contestant.measure(f"{num_bytes} B, {num_clients} at once", bodies, num_clients)
        streams = [body_of(number + i, 2000, stream=True) for i in range(args.streams)]
        number += args.streams
        for contestant in contestants:
            contestant.measure("stream", streams, 1)
    print("| router | request | CPU us | wall p50 us |\n|---|---|---|---|")
    for contestant in contestants:
        for what, wall in contestant.wall_us.items():
            cpu = median(contestant.cpu_us[what]) if contestant.pid else 0.0
            if what == "stream":
                plain = contestant.cpu_us.get("2000 B, 1 at once", [0.0])
                cpu, name = (cpu - median(plain)) / NUM_CHUNKS, "a streamed chunk"
                print(f"| {contestant.name} | {name} | {cpu:.1f} | |", flush=True)
            else:
                print(f"| {contestant.name} | {what} | {cpu:.0f} | {median(wall):.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""The job `anaphora serve`: from a model's name to a server that runs until it is told to stop."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anaphora.engine.build import EngineOptions
from anaphora.engine.service import EngineService
from anaphora.server.app import DEFAULT_STUCK_AFTER_S, OpenAIServer
from anaphora.server.body import DEFAULT_LIMIT_BYTES
from anaphora.server.client import ServerError, TimingClient
from anaphora.server.demo import run_demo
from anaphora.server.loading import load_engine
from anaphora.server.logs import log_as_json
from anaphora.server.run import Server, bind, url_of
from anaphora.server.served_model import ServedModel
from anaphora.server.trace import StepTrace
from anaphora.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anaphora.cache.events import Event
    from anaphora.engine.loop import Engine
    from anaphora.server.kv_events import KvEventOptions, KvEvents
    from anaphora.server.tenants import Tenants


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and how.

    model: as `load_model` takes it, None for the default model. engine: as `build_engine` takes it.
    uses_cache: whether requests read and write the prefix cache.
    allows_priority: whether clients choose their priority.
    has_demo: hold a scripted conversation once the server is up; exits_after_demo: and stop after it.
    kv_events: publish them so; None for not. tenants, allows_reset, stuck_after_s: as `OpenAIServer` has them.
    drain_s: how long requests may go on once the server was told to stop.
    trace: a file for a trace of the engine's steps. logs_json: log lines of JSON.
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineOptions = field(default_factory=EngineOptions)
    body_limit_bytes: int = DEFAULT_LIMIT_BYTES
    uses_cache: bool = True
    allows_priority: bool = False
    has_demo: bool = False
    exits_after_demo: bool = False
    kv_events: KvEventOptions | None = None
    tenants: Tenants | None = None
    allows_reset: bool = False
    drain_s: float = 30.0
    stuck_after_s: float = DEFAULT_STUCK_AFTER_S
    trace: Path | None = None
    logs_json: bool = False


def serve(options: ServeOptions) -> int:
    """Serve until a signal; return the exit code, 1 if a demo failed that was to be the end.

    Raises:
        ListenError: the address cannot be listened on.
        ModelError: the model cannot be fetched, read or run.
        OptionError: the engine cannot be built with these options.
        EndpointError: KV events cannot be published there.
        TraceError: the trace cannot be written.
    """
    if options.logs_json:
        log_as_json()
    started = time.monotonic()
    sock = bind(options.host, options.port)  # before anything slow
    with sock, contextlib.ExitStack() as opened:
        url = url_of(sock)
        kv_events, trace = _outlets(options, opened)
        model, engine = load_engine(options.model, {**options.engine, "events": bool(kv_events or trace)})
        served = ServedModel.of(model, engine)
        del model  # the executor has what it needs of the weights
        api = OpenAIServer(
            EngineService(engine, _both(kv_events, trace), trace),
            served,
            body_limit_bytes=options.body_limit_bytes,
            uses_cache=options.uses_cache,
            allows_priority=options.allows_priority,
            tenants=options.tenants,
            kv_events=kv_events,
            allows_reset=options.allows_reset,
            stuck_after_s=options.stuck_after_s,
        )
        demo = _Demo(url, served.name, exits=options.exits_after_demo)

        def on_started() -> None:
            _say(_banner(url, served, engine, time.monotonic() - started))
            if kv_events is not None:
                replays = kv_events.publisher.replay_endpoint
                _say(f"KV events at {kv_events.publisher.endpoint}{f', replays at {replays}' if replays else ''}\n")
            if options.has_demo:
                demo.start(server)

        def on_waiting(num_requests: int) -> None:
            who, them = ("1 request has", "it") if num_requests == 1 else (f"{num_requests} requests have", "them")
            _say(f"\nStopping: {who} {options.drain_s:.0f} s to finish; Ctrl-C again ends {them} now.")

        server = Server(
            api, on_started=on_started, on_draining=api.drain, on_waiting=on_waiting, grace_s=options.drain_s
        )
        server.run(sockets=[sock])
    _say("\nStopped.")
    return int(demo.has_failed and options.exits_after_demo)


def _outlets(options: ServeOptions, opened: contextlib.ExitStack) -> tuple[KvEvents | None, StepTrace | None]:
    """What the engine's doings are told to. Before the model is loaded, so that a fault is known at once."""
    kv_events = None
    if options.kv_events is not None:
        from anaphora.server.kv_events import KvEvents  # noqa: PLC0415  # needs ZMQ, an extra of its own

        kv_events = KvEvents(options.kv_events)
        opened.callback(kv_events.publisher.close)
    trace = None
    if options.trace is not None:
        trace = StepTrace(options.trace)
        opened.callback(trace.close)
    return kv_events, trace


def _both(kv_events: KvEvents | None, trace: StepTrace | None) -> Callable[[list[Event]], None] | None:
    """Who takes the cache's events, None if nobody wants them."""
    if trace is None:
        return None if kv_events is None else kv_events.publish

    def take(events: list[Event]) -> None:
        trace.cached(events)
        if kv_events is not None:
            kv_events.publish(events)

    return take


class _Demo:
    """The scripted conversation, on a thread of its own beside the server."""

    def __init__(self, url: str, model: str, *, exits: bool) -> None:
        self._url = url
        self._model = model
        self._exits = exits
        self.has_failed = False

    def start(self, server: Server) -> None:
        threading.Thread(target=self._run, args=(server,), name="anaphora-demo", daemon=True).start()

    def _run(self, server: Server) -> None:
        try:
            with TimingClient(self._url) as client:
                run_demo(client, self._model)
            if not self._exits:
                _say(f"\nThe server is yours: {self._url}/v1 (Ctrl-C stops it)")
        except ServerError as error:
            self.has_failed = True
            if not server.should_exit:  # else it was cut short by the end of the server
                print(f"The demo could not go on: {error}", file=sys.stderr, flush=True)
        finally:
            if self._exits:
                server.stop()


def _banner(url: str, model: ServedModel, engine: Engine, seconds: float) -> str:
    num_pool_tokens = engine.manager.num_blocks * engine.manager.block_size
    num_host_tokens = engine.manager.num_host_blocks * engine.manager.block_size
    host = f"; host memory {num_host_tokens:,} more" if num_host_tokens else ""
    asks_chat = model.chat_template is not None
    path = "chat/completions" if asks_chat else "completions"
    asked = (
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        if asks_chat
        else '"prompt": "Once upon a time"'
    )
    call = "chat.completions" if asks_chat else "completions"
    return f"""\
Anaphora {__version__}: {model.name} at {url}/v1, ready after {seconds:.1f} s
Context {model.max_context:,} tokens; KV pool {num_pool_tokens:,} tokens{host}. Ctrl-C stops it.

  curl {url}/v1/{path} -H 'content-type: application/json' \\
    -d '{{"model": "{model.name}", "temperature": 0, {asked}}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = client.{call}.create(model="{model.name}", temperature=0, {_as_python(asked)})
  print(answer.choices[0], answer.usage.prompt_tokens_details)
"""


def _as_python(field_and_value: str) -> str:
    name, value = field_and_value.split(": ", 1)
    return f"{name.strip(chr(34))}={value}"


def _say(text: str) -> None:
    print(text, flush=True)

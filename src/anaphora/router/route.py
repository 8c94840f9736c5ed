"""The job `anaphora route`: from options to a router that runs until it is told to stop."""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.fleet.cost import CostPolicy
from anaphora.fleet.index import DEFAULT_MAX_BYTES
from anaphora.fleet.knowledge import DEFAULT_NUM_BLOCKS
from anaphora.router.app import RouterApp
from anaphora.router.fleet_state import Fleet
from anaphora.router.llmd.config import ConfigError, Discovery, PickerConfig, load_config, with_events
from anaphora.router.metrics import Metrics
from anaphora.router.probing import Prober
from anaphora.router.prompt import ModelPrompts, PromptSource, TextEstimate
from anaphora.router.proxy import Proxy
from anaphora.router.replica import ReplicaSpec, ReplicaUrlError
from anaphora.router.upstream import Upstream
from anaphora.server.run import Server, bind, url_of
from anaphora.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anaphora.router.fleet_state import Policy
    from anaphora.router.following import Follower

_RELOAD_S = 1.0


class RouteError(Exception):
    """The router cannot start; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What to route to, and how.

    replicas_file: one replica a line (URL, then options like kv-events=tcp://...), read again whenever it changes.
    config: an EndpointPickerConfig of llm-d; without it requests go where they cost least time.
    ext_proc: an address, 0.0.0.0:9002, where Envoy asks for endpoints; TLS with a certificate and its key (PEM).
    model: a path, for exact tokens; without it the text is estimated.
    """

    replicas: tuple[ReplicaSpec, ...] = ()
    replicas_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    model: str | None = None
    block_size: int = 16
    num_blocks: int = DEFAULT_NUM_BLOCKS
    max_running: int = 64
    index_bytes: int = DEFAULT_MAX_BYTES
    body_limit_bytes: int = 32 * 2**20
    connect_s: float = 3.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    probe_s: float = 1.0
    is_shadow: bool = False
    binds_salts: bool = False
    salt_secret: bytes | None = None
    config: Path | None = None
    ext_proc: str | None = None
    ext_proc_certificate: bytes | None = None
    ext_proc_key: bytes | None = None
    ext_proc_endpoints: int = 1


def build_app(options: RouteOptions, prompts: PromptSource, policy: Policy | None = None) -> RouterApp:
    """Put the parts together.

    Raises RouteError for a file of replicas that cannot be read.
    """
    specs = list(options.replicas)
    discovery: Discovery | None = None
    if options.config is None:
        fleet = Fleet(
            policy or CostPolicy(),
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            max_running=options.max_running,
            index_bytes=options.index_bytes,
        )
    else:
        config = _load_config(options.config)
        specs = [with_events(spec, config) for spec in specs]
        discovery = config.discovery
        fleet = Fleet(
            config.policy,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_running=options.max_running,
            index_bytes=config.index_bytes or options.index_bytes,
            speculative_ttl_s=config.speculative_ttl_s,
        )
    upstream = Upstream(connect_s=options.connect_s, first_byte_s=options.first_byte_s, idle_s=options.idle_s)
    metrics = Metrics(fleet)
    salt_secret = (options.salt_secret or secrets.token_bytes(32)) if options.binds_salts else None
    proxy = Proxy(
        fleet, prompts, upstream, metrics,
        body_limit_bytes=options.body_limit_bytes, salt_secret=salt_secret, steers=not options.is_shadow,
    )  # fmt: skip
    background: list[Callable[[], Awaitable[None]]] = [Prober(fleet, upstream, options.probe_s).run]
    if options.replicas_file is not None:
        file = _WatchedFile(options.replicas_file, _read_replicas, specs, fleet)
        specs = [*specs, *file.read()]
        background.append(file.watch)
    elif discovery is not None:
        file = _WatchedFile(discovery.path, discovery.read, specs, fleet)
        specs = [*specs, *file.read()]
        if discovery.is_watched:
            background.append(file.watch)
    fleet.reconcile(specs)
    if options.replicas_file is not None or discovery is not None or any(spec.kv_events for spec in specs):
        background.append(_follower(fleet).run)
    if options.ext_proc is not None:
        background.append(_picker_job(options, options.ext_proc, fleet, proxy, metrics))
    return RouterApp(fleet, proxy, metrics, upstream, background)


def route(options: RouteOptions) -> int:
    """Route until a signal; return the exit code.

    Raises:
        ListenError: the address cannot be listened on.
        RouteError, ModelError: see there.
    """
    with bind(options.host, options.port) as sock:
        app = build_app(options, prompt_source(options.model))
        names = ", ".join(app.replica_names) or "no replica yet"

        def on_started() -> None:
            tokens = "exact tokens" if options.model else "tokens estimated from text"
            _say(f"Anaphora {__version__}: routing {url_of(sock)}/v1 to {names}; {tokens}. Ctrl-C stops it.")

        Server(app, on_started=on_started).run(sockets=[sock])
    _say("\nStopped.")
    return 0


def prompt_source(model: str | None) -> PromptSource:
    """Return how prompts become tokens. Raises ModelError where the model's tokenizer cannot be read."""
    if model is None:
        return TextEstimate()
    from anaphora.router.model_text import load_text_side  # noqa: PLC0415 - needs the tokenizers package

    return ModelPrompts(*load_text_side(Path(model)))


def _picker_job(
    options: RouteOptions, address: str, fleet: Fleet, proxy: Proxy, metrics: Metrics
) -> Callable[[], Awaitable[None]]:
    from anaphora.router.envoy import EndpointPicker, make_server, serve_picker  # noqa: PLC0415 - needs grpcio

    picker = EndpointPicker(
        fleet, proxy, metrics, num_endpoints=options.ext_proc_endpoints, body_limit_bytes=options.body_limit_bytes
    )

    async def run() -> None:
        server, _ = make_server(address, certificate=options.ext_proc_certificate, key=options.ext_proc_key)
        await serve_picker(picker, fleet, server)

    return run


def _load_config(path: Path) -> PickerConfig:
    try:
        return load_config(path)
    except ConfigError as error:
        raise RouteError(f"{path}: {error}") from None


def _follower(fleet: Fleet) -> Follower:
    from anaphora.router.following import Follower  # noqa: PLC0415 - needs pyzmq, which approximations do not

    return Follower(fleet)


def parse_replicas(text: str) -> list[ReplicaSpec]:
    """Read one replica a line, `URL [kv-events=ENDPOINT] [kv-replay=ENDPOINT] [topic=TEXT] [label:NAME=TEXT]`.

    What follows a # is a comment.

    Raises ValueError with the line's number.
    """
    specs: list[ReplicaSpec] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            specs.append(parse_replica(words))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return specs


def parse_replica(words: list[str]) -> ReplicaSpec:
    """Read a URL and its options. Raises ValueError."""
    url, *rest = words
    options: dict[str, str | None] = {}
    labels: list[tuple[str, str]] = []
    for word in rest:
        name, equals, value = word.partition("=")
        if equals and name.startswith("label:"):
            labels.append((name.removeprefix("label:"), value))
        elif equals and name in {"kv-events", "kv-replay", "topic"}:
            options[name.replace("-", "_")] = value
        else:
            raise ValueError(f"expected kv-events=, kv-replay=, topic= or label:NAME=, got {word[:100]!r}")
    return replace(ReplicaSpec.of(url, **options), labels=tuple(labels))


def _read_replicas(path: Path) -> list[ReplicaSpec]:
    return parse_replicas(path.read_text(encoding="utf-8"))


class _WatchedFile:
    """A file of replicas; a fault in it leaves the fleet as it was."""

    def __init__(
        self, path: Path, read: Callable[[Path], list[ReplicaSpec]], fixed: list[ReplicaSpec], fleet: Fleet
    ) -> None:
        self._path = path
        self._read = read
        self._fixed = fixed
        self._fleet = fleet
        self._seen: tuple[int, int] | None = None

    def read(self) -> list[ReplicaSpec]:
        try:
            state = self._path.stat()
            self._seen = (state.st_mtime_ns, state.st_size)
            return self._read(self._path)
        except (OSError, ValueError) as error:
            raise RouteError(f"{self._path}: {error}") from None

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_RELOAD_S)
            try:
                state = self._path.stat()
            except OSError:
                continue  # being replaced, perhaps
            if self._seen == (state.st_mtime_ns, state.st_size):
                continue
            try:
                joined, left = self._fleet.reconcile([*self._fixed, *self.read()])
            except RouteError as error:
                _say(f"anaphora: {error}; the replicas stay as they are")
                continue
            if joined or left:
                _say(f"Replicas: {', '.join(joined) or 'none'} joined, {', '.join(left) or 'none'} drain.")


def _say(text: str) -> None:
    print(text, file=sys.stderr if text.startswith("anaphora:") else sys.stdout, flush=True)


__all__ = ["ReplicaUrlError", "RouteError", "RouteOptions", "build_app", "parse_replica", "route"]

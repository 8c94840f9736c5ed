"""The job `anaphora route`: from options to a router that runs until it is told to stop."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.fleet.cost import CostPolicy
from anaphora.fleet.index import DEFAULT_MAX_BYTES
from anaphora.fleet.knowledge import DEFAULT_NUM_BLOCKS
from anaphora.router.admission import Admission
from anaphora.router.app import InProgress, RouterApp
from anaphora.router.discovery.dns_names import DEFAULT_INTERVAL_S, DnsName, DnsSource
from anaphora.router.discovery.membership import EventPorts, Membership
from anaphora.router.discovery.replica_list import parse_replica, read_replicas
from anaphora.router.discovery.watched_file import FileError, WatchedFile
from anaphora.router.fleet_state import Fleet
from anaphora.router.llmd.config import ConfigError, PickerConfig, load_config, with_events
from anaphora.router.metrics import Metrics
from anaphora.router.probing import Prober
from anaphora.router.prompt import ModelPrompts, PromptSource, TextEstimate
from anaphora.router.protocol import RouterProtocol
from anaphora.router.proxy import Proxy
from anaphora.router.replica import ReplicaSpec, ReplicaUrlError
from anaphora.router.resource_file import Resources, read_resources
from anaphora.router.rewrites import ModelRewrites
from anaphora.router.tls import ReplicaTls, TlsError
from anaphora.router.upstream import Upstream
from anaphora.server.run import Server, bind, url_of
from anaphora.version import __version__

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable

    from anaphora.router.fleet_state import Policy
    from anaphora.router.following import Follower


class RouteError(Exception):
    """The router cannot start; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Which replicas a Kubernetes cluster has, and where its API is.

    pool_name: an InferencePool, whose objectives and model rewrites count too; or selector, a label selector as kubectl
    takes it, with the ports at which each pod serves. namespace: of either; None for our own. api_url: None in a pod.
    """

    pool_name: str | None = None
    selector: str | None = None
    ports: tuple[int, ...] = ()
    namespace: str | None = None
    api_url: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What to route to, and how.

    replicas_file: one replica a line (URL, then options like kv-events=tcp://...), read again whenever it changes.
    dns: names to look up every dns_interval_s. cluster: pods of Kubernetes. kv_events_port, kv_replay_port: where
    replicas found in either way publish their KV events; None: they do not.
    drain_s: how long requests may go on once the router was told to stop.
    resources_file: InferenceObjective and InferenceModelRewrite in YAML, read again whenever it changes.
    config: an EndpointPickerConfig of llm-d; without it requests go where they cost least time.
    ext_proc: an address, 0.0.0.0:9002, where Envoy asks for endpoints; TLS with a certificate and its key (PEM).
    model: a path, for exact tokens; without it the text is estimated.
    tls: for replicas with https.
    """

    replicas: tuple[ReplicaSpec, ...] = ()
    replicas_file: Path | None = None
    dns: tuple[DnsName, ...] = ()
    dns_interval_s: float = DEFAULT_INTERVAL_S
    cluster: Cluster | None = None
    kv_events_port: int | None = None
    kv_replay_port: int | None = None
    resources_file: Path | None = None
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
    is_conformance_test: bool = False
    tls: ReplicaTls = field(default_factory=ReplicaTls)
    drain_s: float = 30.0


def build_app(options: RouteOptions, prompts: PromptSource, policy: Policy | None = None) -> RouterApp:
    """Put the parts together.

    Raises RouteError for a file that cannot be read or is of no use, or a cluster that cannot be found.
    """
    specs = list(options.replicas)
    config: PickerConfig | None = None
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
        fleet = Fleet(
            config.policy,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_running=options.max_running,
            index_bytes=config.index_bytes or options.index_bytes,
            speculative_ttl_s=config.speculative_ttl_s,
        )
    upstream = Upstream(
        connect_s=options.connect_s, first_byte_s=options.first_byte_s, idle_s=options.idle_s,
        ssl_context=_ssl_context(options.tls),
    )  # fmt: skip
    metrics = Metrics(fleet)
    admission = Admission(config.saturation if config is not None else None)
    rewrites = ModelRewrites()
    salt_secret = (options.salt_secret or secrets.token_bytes(32)) if options.binds_salts else None
    proxy = Proxy(
        fleet, prompts, upstream, metrics,
        body_limit_bytes=options.body_limit_bytes, salt_secret=salt_secret, steers=not options.is_shadow,
        admission=admission, rewrites=rewrites,
    )  # fmt: skip
    background: list[Callable[[], Awaitable[None]]] = [Prober(fleet, upstream, options.probe_s).run]
    membership = Membership(fleet, _say)
    membership.set("list", specs, quietly=True)
    try:
        background += _sources(options, config, membership, admission, rewrites, metrics)
    except FileError as error:
        raise RouteError(str(error)) from None
    has_events = any(replica.spec.kv_events for replica in fleet.replicas.values())
    if isinstance(prompts, TextEstimate):  # events name the engine's tokens, in which an estimate finds nothing
        if has_events:
            _say("anaphora: KV events are not followed without --model: prompts are known as text, events as tokens")
    elif len(background) > 1 or has_events:
        background.append(_follower(fleet).run)
    in_progress = InProgress()
    if options.ext_proc is not None:
        background.append(_picker_job(options, options.ext_proc, fleet, proxy, metrics, in_progress))
    return RouterApp(fleet, proxy, metrics, upstream, background, in_progress)


def _ssl_context(tls: ReplicaTls) -> ssl.SSLContext:
    try:
        context = tls.context()
    except TlsError as error:
        raise RouteError(str(error)) from None
    if not tls.verifies:
        _say("anaphora: certificates of replicas are not checked (--replica-insecure): who is in between reads all")
    return context


def _sources(
    options: RouteOptions,
    config: PickerConfig | None,
    membership: Membership,
    admission: Admission,
    rewrites: ModelRewrites,
    metrics: Metrics,
) -> list[Callable[[], Awaitable[None]]]:
    """Read the files now, and return what goes on following files, names and clusters."""
    jobs: list[Callable[[], Awaitable[None]]] = []
    discovery = config.discovery if config is not None else None
    if options.replicas_file is not None:
        jobs.append(_replica_file(options.replicas_file, read_replicas, membership, config).watch)
    elif discovery is not None:
        file = _replica_file(discovery.path, discovery.read, membership, config)
        if discovery.is_watched:
            jobs.append(file.watch)
    events = _event_ports(options, config)
    for name in options.dns:
        lost = metrics.source_lost.labels(name.text).set
        source = DnsSource(name, membership, interval_s=options.dns_interval_s, events=events, on_lost=lost)
        jobs.append(source.run)
    if options.cluster is not None:
        jobs += _cluster_jobs(options.cluster, events, membership, admission, rewrites, metrics)
    if options.resources_file is not None:
        pool = options.cluster.pool_name if options.cluster is not None else None

        def use(resources: Resources) -> None:
            admission.set("file", resources.objectives)
            rewrites.set("file", resources.rewrites)

        resource_file = WatchedFile(options.resources_file, lambda path: read_resources(path, pool), use, _say)
        resource_file.load()
        jobs.append(resource_file.watch)
    return jobs


def _replica_file(
    path: Path, read: Callable[[Path], list[ReplicaSpec]], membership: Membership, config: PickerConfig | None
) -> WatchedFile[list[ReplicaSpec]]:
    is_first = True

    def use(specs: list[ReplicaSpec]) -> None:
        nonlocal is_first
        if config is not None:
            specs = [with_events(spec, config) for spec in specs]
        membership.set("file", specs, quietly=is_first)
        is_first = False

    file = WatchedFile(path, read, use, _say)
    file.load()
    return file


def _cluster_jobs(
    cluster: Cluster,
    events: EventPorts | None,
    membership: Membership,
    admission: Admission,
    rewrites: ModelRewrites,
    metrics: Metrics,
) -> list[Callable[[], Awaitable[None]]]:
    from anaphora.router.kubernetes.api import ApiAccess, ApiServer, NotInClusterError, own_namespace  # noqa: PLC0415
    from anaphora.router.kubernetes.inference import InferenceResources  # noqa: PLC0415 - needs httpx
    from anaphora.router.kubernetes.pool import PodSource, PoolName, Selection  # noqa: PLC0415

    try:
        if cluster.api_url is None:
            access = ApiAccess.in_cluster(os.environ)
        else:
            access = ApiAccess(cluster.api_url, cluster.token_file, cluster.ca_file, own_namespace())
    except NotInClusterError as error:
        raise RouteError(str(error)) from None
    api = ApiServer(access, metrics.source_lost.labels("kubernetes").set)
    namespace = cluster.namespace or api.namespace
    if cluster.pool_name is None:
        selection = Selection(cluster.selector or "", cluster.ports)
        return [PodSource(api, selection, membership, namespace=namespace, events=events).run]
    pool = PoolName(namespace, cluster.pool_name)
    return [
        PodSource(api, pool, membership, namespace=namespace, events=events).run,
        InferenceResources(api, pool, admission, rewrites).run,
    ]


def _event_ports(options: RouteOptions, config: PickerConfig | None) -> EventPorts | None:
    if options.kv_events_port is not None:
        return EventPorts(options.kv_events_port, options.kv_replay_port)
    if config is not None and config.kv_events_port is not None:
        return EventPorts(config.kv_events_port, config.kv_replay_port, config.topic)
    return None


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

        def on_waiting(num_requests: int) -> None:
            _say(f"\nStopping after {num_requests} requests, or in {options.drain_s:g} s; Ctrl-C again for at once.")

        server = make_server(app, on_started=on_started, on_waiting=on_waiting, drain_s=options.drain_s)
        server.run(sockets=[sock])
    _say("\nStopped.")
    return 0


def make_server(
    app: RouterApp,
    *,
    on_started: Callable[[], None] | None = None,
    on_waiting: Callable[[int], None] | None = None,
    drain_s: float | None = None,
) -> Server:
    """Return what serves the router: on uvloop where that is installed. See Server; drain_s is its grace_s."""
    return Server(
        app,
        on_started=on_started,
        on_draining=app.drain,
        on_waiting=on_waiting,
        grace_s=drain_s,
        http=RouterProtocol,
        loop="auto",
        dates=False,
    )


def prompt_source(model: str | None) -> PromptSource:
    """Return how prompts become tokens. Raises ModelError where the model's tokenizer cannot be read."""
    if model is None:
        return TextEstimate()
    from anaphora.router.model_text import load_text_side  # noqa: PLC0415 - needs the tokenizers package

    return ModelPrompts(*load_text_side(Path(model)))


def _picker_job(
    options: RouteOptions, address: str, fleet: Fleet, proxy: Proxy, metrics: Metrics, in_progress: InProgress
) -> Callable[[], Awaitable[None]]:
    from anaphora.router.conformance import Conformance  # noqa: PLC0415
    from anaphora.router.envoy import EndpointPicker, make_picker_server, serve_picker  # noqa: PLC0415 - needs grpcio

    picker = EndpointPicker(
        fleet, proxy, metrics, in_progress,
        num_endpoints=options.ext_proc_endpoints, body_limit_bytes=options.body_limit_bytes,
        conformance=Conformance(_pool_shown(options.cluster)) if options.is_conformance_test else None,
    )  # fmt: skip

    async def run() -> None:
        server, _ = make_picker_server(address, certificate=options.ext_proc_certificate, key=options.ext_proc_key)
        await serve_picker(picker, fleet, server)

    return run


def _pool_shown(cluster: Cluster | None) -> str | None:
    if cluster is None or cluster.pool_name is None:
        return None
    from anaphora.router.kubernetes.api import own_namespace  # noqa: PLC0415 - needs httpx

    return f"{cluster.namespace or own_namespace()}/{cluster.pool_name}"


def _load_config(path: Path) -> PickerConfig:
    try:
        return load_config(path)
    except ConfigError as error:
        raise RouteError(f"{path}: {error}") from None


def _follower(fleet: Fleet) -> Follower:
    from anaphora.router.following import Follower  # noqa: PLC0415 - needs pyzmq, which approximations do not

    return Follower(fleet)


def _say(text: str) -> None:
    print(text, file=sys.stderr if text.startswith("anaphora:") else sys.stdout, flush=True)


__all__ = ["Cluster", "DnsName", "ReplicaUrlError", "RouteError", "RouteOptions", "build_app", "parse_replica", "route"]

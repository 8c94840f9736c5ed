"""`anaphora route` on the command line: its options, and what it does with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anaphora.router.route import Cluster


def add_route(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--replica",
        action="append",
        default=[],
        nargs="+",
        metavar=("URL", "OPTION"),
        help="a replica, say http://10.0.0.5:8000, then, if it publishes KV events, kv-events=tcp://10.0.0.5:5557 and "
        "kv-replay=tcp://10.0.0.5:5558, and ranks=N for N data-parallel ranks; may be repeated",
    )
    parser.add_argument(
        "--replicas-file", type=Path, metavar="FILE", help="the same, a replica a line; read again when it changes"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="an EndpointPickerConfig of llm-d, instead of prices in seconds"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on, 0 for any (default: %(default)s)")
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="the model's .gguf file or folder, for exact tokens (default: estimated from text)",
    )
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens of a block; engines' must be multiples of it"
    )
    parser.add_argument(
        "--max-running", type=int, default=64, metavar="N", help="requests that a replica runs at once (default: 64)"
    )
    parser.add_argument("--first-byte-timeout", type=float, default=600.0, metavar="S", help="seconds (default: 600)")
    parser.add_argument("--idle-timeout", type=float, default=120.0, metavar="S", help="between bytes (default: 120)")
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S",
        help="how long requests may go on after SIGTERM (default: 30)",
    )  # fmt: skip
    _add_discovery(parser)
    tls = parser.add_argument_group("Replicas with https")
    tls.add_argument(
        "--replica-ca", type=Path, metavar="FILE", help="who signs their certificates (PEM; default: the system's)"
    )
    tls.add_argument("--replica-cert", type=Path, metavar="FILE", help="our certificate, where they ask for one (PEM)")
    tls.add_argument("--replica-key", type=Path, metavar="FILE", help="its key (PEM; default: in the same file)")
    tls.add_argument("--replica-insecure", action="store_true", help="do not check whose certificate it is")
    envoy = parser.add_argument_group("Envoy")
    envoy.add_argument("--ext-proc", metavar="ADDRESS", help="answer Envoy's ext_proc filter there, say 0.0.0.0:9002")
    envoy.add_argument("--ext-proc-cert", type=Path, metavar="FILE", help="TLS certificate (PEM); default: no TLS")
    envoy.add_argument("--ext-proc-key", type=Path, metavar="FILE", help="its key (PEM)")
    envoy.add_argument(
        "--ext-proc-self-signed", action="store_true",
        help="TLS with a certificate made at the start, which gateways of Kubernetes take from a picker",
    )  # fmt: skip
    envoy.add_argument(
        "--ext-proc-endpoints", type=int, default=1, metavar="N",
        help="endpoints named, the choice and its fallbacks; only override_host takes more than 1 (default: 1)",
    )  # fmt: skip
    envoy.add_argument(
        "--ext-proc-conformance", action="store_true",
        help="answer the gateways' conformance tests, which let any client choose its endpoint: not for production",
    )  # fmt: skip
    parser.add_argument("--shadow", action="store_true", help="decide and tell, but send requests round robin")
    parser.add_argument(
        "--bind-salts",
        action="store_true",
        help="derive each request's cache salt from its API key, so that tenants share nothing and cannot probe",
    )
    parser.add_argument(
        "--salt-secret-file",
        type=Path,
        metavar="FILE",
        help="what salts are derived with (default: drawn at the start)",
    )


def _add_discovery(parser: argparse.ArgumentParser) -> None:
    found = parser.add_argument_group("Replicas that are found")
    found.add_argument(
        "--dns", action="append", default=[], metavar="NAME",
        help="HOST:PORT for its A and AAAA records, or _http._tcp.HOST for its SRV records; may be repeated",
    )  # fmt: skip
    found.add_argument("--dns-interval", type=float, default=5.0, metavar="S", help="between lookups (default: 5)")
    found.add_argument("--pool-name", metavar="NAME", help="the pods of a Kubernetes InferencePool")
    found.add_argument("--pool-namespace", metavar="NAME", help="its namespace (default: the router's own)")
    found.add_argument(
        "--endpoint-selector", metavar="SELECTOR", help="pods by their labels, app=vllm, instead of those of a pool"
    )
    found.add_argument("--endpoint-target-ports", metavar="PORT[,PORT]", help="where each of those pods serves")
    found.add_argument(
        "--kv-events-port", type=int, metavar="PORT",
        help="where replicas that are found publish their KV events; rank n of a pod at the nth port after it",
    )  # fmt: skip
    found.add_argument("--kv-replay-port", type=int, metavar="PORT", help="where they replay them")
    found.add_argument(
        "--kube-api", metavar="URL",
        help="of the Kubernetes API, say http://127.0.0.1:8001 of `kubectl proxy` (default: that of the router's pod)",
    )  # fmt: skip
    found.add_argument("--kube-token-file", type=Path, metavar="FILE", help="the bearer token for --kube-api")
    found.add_argument("--kube-ca-file", type=Path, metavar="FILE", help="its certificate authority (PEM)")
    parser.add_argument(
        "--resources", type=Path, metavar="FILE",
        help="InferenceObjective and InferenceModelRewrite in YAML; read again when it changes",
    )  # fmt: skip


def _cluster(args: argparse.Namespace) -> Cluster | None:
    """Raises ValueError."""
    from anaphora.router.route import Cluster

    if args.pool_name is not None and args.endpoint_selector is not None:
        raise ValueError("--pool-name and --endpoint-selector exclude each other")
    if (args.endpoint_selector is None) != (args.endpoint_target_ports is None):
        raise ValueError("--endpoint-selector and --endpoint-target-ports go together")
    if args.pool_name is None and args.endpoint_selector is None:
        for name in ("pool_namespace", "kube_api", "kube_token_file", "kube_ca_file"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --pool-name or --endpoint-selector")
        return None
    if args.kube_api is None and (args.kube_token_file or args.kube_ca_file):
        raise ValueError("--kube-token-file and --kube-ca-file need --kube-api")
    if args.kube_api is not None and not args.kube_api.startswith(("http://", "https://")):
        raise ValueError(f"--kube-api: expected a URL like https://10.0.0.1:6443, got {args.kube_api[:200]!r}")
    words = [word.strip() for word in (args.endpoint_target_ports or "").split(",") if word.strip()]
    if not all(word.isdecimal() and 0 < int(word) < 65_536 for word in words):
        raise ValueError(f"--endpoint-target-ports: expected ports like 8000,8001, got {args.endpoint_target_ports!r}")
    if args.endpoint_selector is not None and not words:
        raise ValueError("--endpoint-target-ports: expected a port")
    return Cluster(
        pool_name=args.pool_name,
        selector=args.endpoint_selector,
        ports=tuple(map(int, words)),
        namespace=args.pool_namespace,
        api_url=args.kube_api,
        token_file=args.kube_token_file,
        ca_file=args.kube_ca_file,
    )


def _run(args: argparse.Namespace) -> int:
    from anaphora.model.errors import ModelError
    from anaphora.router.route import DnsName, RouteError, RouteOptions, parse_replica, route
    from anaphora.router.tls import ReplicaTls
    from anaphora.server.run import ListenError

    try:
        cluster = _cluster(args)
    except ValueError as error:
        return _fail(str(error), code=2)
    if not (args.replica or args.replicas_file or args.config or args.dns or cluster):
        return _fail(
            "route needs --replica URL, --replicas-file FILE, --config FILE, --dns NAME, --pool-name NAME or "
            "--endpoint-selector SELECTOR",
            code=2,
        )
    for name, port in (("--kv-events-port", args.kv_events_port), ("--kv-replay-port", args.kv_replay_port)):
        if port is not None and not 0 < port < 65_536:
            return _fail(f"{name}: expected 1 to 65535, got {port}", code=2)
    if args.kv_replay_port is not None and args.kv_events_port is None:
        return _fail("--kv-replay-port needs --kv-events-port", code=2)
    try:
        names = tuple(map(DnsName.of, args.dns))
    except ValueError as error:
        return _fail(f"--dns: {error}", code=2)
    for name, value in (
        ("--block-size", args.block_size),
        ("--max-running", args.max_running),
        ("--ext-proc-endpoints", args.ext_proc_endpoints),
    ):
        if value < 1:
            return _fail(f"{name}: expected a whole number from 1 up, got {value}", code=2)
    for name, value in (
        ("--first-byte-timeout", args.first_byte_timeout),
        ("--idle-timeout", args.idle_timeout),
        ("--dns-interval", args.dns_interval),
        ("--drain-timeout", args.drain_timeout),
    ):
        if not value > 0:
            return _fail(f"{name}: expected seconds above 0, got {value}", code=2)
    if not 0 <= args.port <= 65_535:
        return _fail(f"--port: expected 0 to 65535, got {args.port}", code=2)
    try:
        replicas = tuple(spec for words in args.replica for spec in parse_replica(words))
        secret = args.salt_secret_file.read_bytes() if args.salt_secret_file else None
    except ValueError as error:
        return _fail(f"--replica: {error}", code=2)
    except OSError as error:
        return _fail(f"--salt-secret-file: {error}")
    if (args.ext_proc_cert is None) != (args.ext_proc_key is None):
        return _fail("--ext-proc-cert and --ext-proc-key go together", code=2)
    if args.ext_proc_self_signed and args.ext_proc_cert is not None:
        return _fail("--ext-proc-self-signed and --ext-proc-cert exclude each other", code=2)
    for name in ("ext_proc_cert", "ext_proc_self_signed", "ext_proc_conformance"):
        if getattr(args, name) and args.ext_proc is None:
            return _fail(f"--{name.replace('_', '-')} needs --ext-proc ADDRESS", code=2)
    try:
        certificate = args.ext_proc_cert.read_bytes() if args.ext_proc_cert else None
        key = args.ext_proc_key.read_bytes() if args.ext_proc_key else None
    except OSError as error:
        return _fail(f"--ext-proc-cert, --ext-proc-key: {error}")
    if args.ext_proc_self_signed:
        from anaphora.router.certificate import self_signed

        certificate, key = self_signed()
    options = RouteOptions(
        replicas=replicas,
        replicas_file=args.replicas_file,
        dns=names,
        dns_interval_s=args.dns_interval,
        cluster=cluster,
        kv_events_port=args.kv_events_port,
        kv_replay_port=args.kv_replay_port,
        resources_file=args.resources,
        host=args.host,
        port=args.port,
        model=args.model,
        block_size=args.block_size,
        max_running=args.max_running,
        first_byte_s=args.first_byte_timeout,
        idle_s=args.idle_timeout,
        is_shadow=args.shadow,
        binds_salts=args.bind_salts,
        salt_secret=secret,
        config=args.config,
        ext_proc=args.ext_proc,
        ext_proc_certificate=certificate,
        ext_proc_key=key,
        ext_proc_endpoints=args.ext_proc_endpoints,
        is_conformance_test=args.ext_proc_conformance,
        tls=ReplicaTls(args.replica_ca, args.replica_cert, args.replica_key, verifies=not args.replica_insecure),
        drain_s=args.drain_timeout,
    )
    try:
        return route(options)
    except (RouteError, ListenError, ModelError) as error:
        return _fail(str(error))


def _fail(message: str, code: int = 1) -> int:
    print(f"anaphora: {message}", file=sys.stderr, flush=True)
    return code

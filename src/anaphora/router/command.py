"""`anaphora route` on the command line: its options, and what it does with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


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
        "kv-replay=tcp://10.0.0.5:5558; may be repeated",
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
    envoy = parser.add_argument_group("Envoy")
    envoy.add_argument("--ext-proc", metavar="ADDRESS", help="answer Envoy's ext_proc filter there, say 0.0.0.0:9002")
    envoy.add_argument("--ext-proc-cert", type=Path, metavar="FILE", help="TLS certificate (PEM); default: no TLS")
    envoy.add_argument("--ext-proc-key", type=Path, metavar="FILE", help="its key (PEM)")
    envoy.add_argument(
        "--ext-proc-endpoints", type=int, default=1, metavar="N",
        help="endpoints named, the choice and its fallbacks; only override_host takes more than 1 (default: 1)",
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


def _run(args: argparse.Namespace) -> int:
    from anaphora.model.errors import ModelError
    from anaphora.router.route import RouteError, RouteOptions, parse_replica, route
    from anaphora.server.run import ListenError

    if not args.replica and args.replicas_file is None and args.config is None:
        return _fail("route needs --replica URL, --replicas-file FILE or --config FILE", code=2)
    for name, value in (
        ("--block-size", args.block_size),
        ("--max-running", args.max_running),
        ("--ext-proc-endpoints", args.ext_proc_endpoints),
    ):
        if value < 1:
            return _fail(f"{name}: expected a whole number from 1 up, got {value}", code=2)
    for name, value in (("--first-byte-timeout", args.first_byte_timeout), ("--idle-timeout", args.idle_timeout)):
        if not value > 0:
            return _fail(f"{name}: expected seconds above 0, got {value}", code=2)
    if not 0 <= args.port <= 65_535:
        return _fail(f"--port: expected 0 to 65535, got {args.port}", code=2)
    try:
        replicas = tuple(map(parse_replica, args.replica))
        secret = args.salt_secret_file.read_bytes() if args.salt_secret_file else None
    except ValueError as error:
        return _fail(f"--replica: {error}", code=2)
    except OSError as error:
        return _fail(f"--salt-secret-file: {error}")
    if (args.ext_proc_cert is None) != (args.ext_proc_key is None):
        return _fail("--ext-proc-cert and --ext-proc-key go together", code=2)
    try:
        certificate = args.ext_proc_cert.read_bytes() if args.ext_proc_cert else None
        key = args.ext_proc_key.read_bytes() if args.ext_proc_key else None
    except OSError as error:
        return _fail(f"--ext-proc-cert, --ext-proc-key: {error}")
    options = RouteOptions(
        replicas=replicas,
        replicas_file=args.replicas_file,
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
    )
    try:
        return route(options)
    except (RouteError, ListenError, ModelError) as error:
        return _fail(str(error))


def _fail(message: str, code: int = 1) -> int:
    print(f"anaphora: {message}", file=sys.stderr, flush=True)
    return code

"""The command line: one thin command a job. Each imports what it needs when it runs, so that `--help` is instant."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anaphora.lab.commands import add_commands
from anaphora.lab.commands.load import add_load, run_load_command
from anaphora.router.command import add_route
from anaphora.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.build import EngineOptions
    from anaphora.identity import BlockDigests
    from anaphora.server.bench import BenchResult, Plan

_MAX_PORT = 65_535
_UNITS = (
    {"": 1}
    | {unit: 1000**i for i, unit in enumerate("KMGT", 1)}
    | {f"{unit}I": 1024**i for i, unit in enumerate("KMGT", 1)}
)
_VLLM_HASHES = ("vllm-sha256", "vllm-sha256-cbor", "vllm-xxhash", "vllm-xxhash-cbor")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 for a failure that was explained, 2 for wrong usage, 130 for Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        _note("\nStopped.")
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "anaphora":
            raise
        extra = "route" if args.command == "route" else "wire" if error.name == "zmq" else "serve"
        advice = f"pip install '.[{extra}]' in a clone of Anaphora"
        return _fail(f"{args.command} needs {error.name}, which is not installed: {advice}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="anaphora", description="Automatic prefix caching for LLM inference.")
    parser.add_argument("--version", action="version", version=f"anaphora {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model over OpenAI's API"))
    add_route(commands.add_parser("route", help="send requests to the replica that has their prefix"))
    _add_bench(commands.add_parser("bench", help="measure what a cached prefix is worth, or send a trace to a server"))
    _add_calibrate(commands.add_parser("calibrate", help="measure this machine for the virtual executor"))
    add_commands(commands)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_serve)
    _add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on, 0 for any (default: %(default)s)")
    _add_engine(parser)
    parser.add_argument(
        "--adapter", type=_named_path, action="append", default=[], metavar="NAME=PATH",
        help="a LoRA adapter in PEFT's format, served as the model NAME; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--body-limit", type=_size, default=8 * 2**20, metavar="SIZE", help="longest request body (default: 8MiB)"
    )
    _add_operations(parser)
    parser.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt anew")
    parser.add_argument("--allow-priority", action="store_true", help="heed the priority that clients ask for")
    parser.add_argument("--demo", action="store_true", help="hold a short conversation first, and show what was reused")
    parser.add_argument("--exit-after-demo", action="store_true", help="stop after the demo; needs --demo")


def _add_operations(parser: argparse.ArgumentParser) -> None:
    operations = parser.add_argument_group("operations")
    operations.add_argument(
        "--api-keys", type=Path, metavar="FILE", help="TOML: the keys of each tenant; others get no answer"
    )
    operations.add_argument(
        "--drain-timeout", type=_seconds, default=30.0, metavar="S",
        help="how long requests may go on after SIGTERM (default: 30)",
    )  # fmt: skip
    operations.add_argument(
        "--stuck-after", type=_seconds, default=120.0, metavar="S",
        help="a step that takes longer fails /health (default: 120)",
    )  # fmt: skip
    operations.add_argument("--log-format", choices=["text", "json"], default="text", help="(default: text)")
    operations.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of every step, for Perfetto")
    operations.add_argument("--allow-reset", action="store_true", help="let POST /reset_prefix_cache empty the cache")
    operations.add_argument("--kv-cache-metrics", action="store_true", help="measure how long blocks stay")
    events = parser.add_argument_group("KV events")
    events.add_argument(
        "--kv-events", nargs="?", const="tcp://127.0.0.1:5557", metavar="ENDPOINT",
        help="publish them, as vLLM does (without ENDPOINT: on tcp://127.0.0.1:5557)",
    )  # fmt: skip
    events.add_argument("--kv-events-replay", metavar="ENDPOINT", help="where lost ones can be asked for again")
    events.add_argument("--kv-events-topic", default="", metavar="TOPIC", help="(default: none)")
    events.add_argument("--kv-events-format", choices=["vllm", "anaphora"], default="vllm", help="(default: vllm)")
    events.add_argument("--kv-events-connect", action="store_true", help="connect to a subscriber that binds")
    events.add_argument("--kv-events-clear-salts", action="store_true", help="publish salts as they are, as vLLM does")
    events.add_argument(
        "--kv-events-hashes", choices=["anaphora", *_VLLM_HASHES], default="anaphora",
        help="names of blocks: secret ones, or those that vLLM computes, for routers that compute them too "
        "(default: anaphora)",
    )  # fmt: skip
    events.add_argument(
        "--kv-events-hash-seed", metavar="TEXT",
        help="PYTHONHASHSEED of the vLLM engines whose names they shall be (default: that of this environment)",
    )  # fmt: skip
    events.add_argument(
        "--kv-events-unsafe-hashes", action="store_true", help="allow vllm-xxhash... with a seed: names can be forged"
    )


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench)
    _add_model(parser)
    _add_engine(parser)
    parser.add_argument(
        "--url",
        type=_server_url,
        help="measure this server, say http://127.0.0.1:8000 (with or without /v1), and no engine of our own",
    )
    parser.add_argument("--prefix-tokens", type=_positive, nargs="+", default=[1000, 4000], metavar="N",
                        help="lengths of the shared prefix (default: 1000 4000)")  # fmt: skip
    parser.add_argument(
        "--suffix-tokens", type=_positive, default=20, metavar="N", help="what follows it (default: 20)"
    )
    parser.add_argument("--repeats", type=_positive, default=3, metavar="N", help="cold runs a length (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_load(parser)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_calibrate)
    _add_model(parser)
    _add_engine(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), metavar="FILE", help="the profile (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, metavar="R",
                        help="requests a second of the trace that checks it (default: busy half the time)")  # fmt: skip


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a .gguf file, a folder in Hugging Face's form, or ORG/NAME of the hub (default: SmolLM2-135M-Instruct)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Options of `build_engine`, by its names; what is left out is its default."""
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--kv-memory", type=_size, metavar="SIZE", help="for the KV pool (default: 1GiB, at most half of what is free)"
    )
    engine.add_argument(
        "--host-kv-memory", type=_size, metavar="SIZE",
        help="for blocks that the KV pool has no room for, to be found again (default: none)",
    )  # fmt: skip
    engine.add_argument("--max-num-seqs", type=_positive, metavar="N", help="requests in a step (default: 64)")
    engine.add_argument("--max-num-batched-tokens", type=_positive, metavar="N", help="tokens in a step (default: 512)")
    engine.add_argument("--max-context", type=_positive, metavar="N", help="longest sequence (default: the model's)")
    engine.add_argument(
        "--executor",
        choices=["auto", "native", "native-bf16", "native-q8", "reference", "torch"],
        help="what runs the model (default: native if it builds)",
    )
    engine.add_argument(
        "--queue-order",
        choices=["fcfs", "lpm", "dfs", "fair"],
        help="who is admitted next: first come; longest cached prefix; depth first; fair, which bounds waiting "
        "(default: fcfs)",
    )
    engine.add_argument(
        "--max-group-overtakes",
        type=_natural,
        metavar="N",
        help="how often a request is passed over for one that shares a prefix with running ones (default: 16)",
    )
    engine.add_argument("--index", choices=["radix", "hash"], help="how prefixes are found (default: radix)")


def _serve(args: argparse.Namespace) -> int:
    if args.exit_after_demo and not args.demo:
        return _fail("--exit-after-demo needs --demo", code=2)
    from anaphora.model import ModelError
    from anaphora.server.loading import OptionError
    from anaphora.server.run import ListenError
    from anaphora.server.serve import ServeOptions, serve
    from anaphora.server.tenants import KeysError, Tenants
    from anaphora.server.trace import TraceError
    from anaphora.wire.frames import EndpointError

    if args.demo and args.api_keys:
        return _fail("--demo has no key; leave out --api-keys", code=2)
    if args.kv_events is None and (args.kv_events_replay or args.kv_events_clear_salts or args.kv_events_connect):
        return _fail("--kv-events-...: needs --kv-events", code=2)
    kv_events = None
    if args.kv_events is not None:
        from anaphora.server.kv_events import KvEventOptions

        kv_events = KvEventOptions(
            args.kv_events,
            args.kv_events_replay,
            args.kv_events_topic,
            args.kv_events_connect,
            args.kv_events_format,
            args.kv_events_clear_salts,
        )
    try:
        tenants = None if args.api_keys is None else Tenants.read(args.api_keys)
    except KeysError as error:
        return _fail(f"--api-keys: {error}")
    engine = _engine_options(args)
    if args.kv_cache_metrics:
        engine["measure_residency"] = True
    try:
        engine["digests"] = _event_digests(args)
    except ValueError as error:
        return _fail(f"--kv-events-hashes: {error}", code=2)
    engine["adapters"] = dict(args.adapter)
    if len(engine["adapters"]) < len(args.adapter):
        return _fail("--adapter: two have the same name", code=2)
    options = ServeOptions(
        model=args.model,
        host=args.host,
        port=args.port,
        engine=engine,
        body_limit_bytes=args.body_limit,
        uses_cache=not args.no_prefix_caching,
        allows_priority=args.allow_priority,
        has_demo=args.demo,
        exits_after_demo=args.exit_after_demo,
        kv_events=kv_events,
        tenants=tenants,
        allows_reset=args.allow_reset,
        drain_s=args.drain_timeout,
        stuck_after_s=args.stuck_after,
        trace=args.trace,
        logs_json=args.log_format == "json",
    )
    try:
        return serve(options)
    except (ModelError, ListenError) as error:
        return _fail(str(error))
    except EndpointError as error:
        return _fail(f"--kv-events: {error}")
    except TraceError as error:
        return _fail(f"--trace: {error}")
    except OptionError as error:
        return _fail(_with_flag(str(error)))


def _event_digests(args: argparse.Namespace) -> BlockDigests | None:
    """How blocks are named in KV events; None for our own way. ValueError for what is not safe, or does not fit."""
    if args.kv_events_hashes == "anaphora":
        if args.kv_events_hash_seed is not None or args.kv_events_unsafe_hashes:
            raise ValueError("a seed belongs to vLLM's names; choose vllm-sha256 or vllm-sha256-cbor")
        return None
    from anaphora.identity import VllmDigests

    if args.kv_events is None or args.kv_events_format != "vllm":
        raise ValueError("vLLM's names need --kv-events, in vLLM's format")
    algorithm = args.kv_events_hashes.removeprefix("vllm-").replace("-", "_")
    seed = os.environ.get("PYTHONHASHSEED") if args.kv_events_hash_seed is None else args.kv_events_hash_seed
    try:
        return VllmDigests(algorithm, seed=seed, allow_unsafe=args.kv_events_unsafe_hashes)
    except ModuleNotFoundError as error:
        raise ValueError(str(error).removeprefix("algorithm: ")) from None
    except ValueError:
        raise ValueError(
            f"{args.kv_events_hashes} with a seed is a digest that anybody can compute and collide, so that one tenant "
            "may be told of, or given, what is another's. Choose vllm-sha256 or vllm-sha256-cbor, set no "
            "--kv-events-hash-seed (nor PYTHONHASHSEED), or add --kv-events-unsafe-hashes if all who send prompts are "
            "trusted"
        ) from None


def _bench(args: argparse.Namespace) -> int:
    if args.log is not None:
        return run_load_command(args)
    from anaphora.server.bench import Plan

    plan = Plan(prefix_tokens=tuple(args.prefix_tokens), suffix_tokens=args.suffix_tokens, repeats=args.repeats)
    result = _bench_engine(args, plan) if args.url is None else _bench_server(args.url, plan)
    if isinstance(result, str):
        return _fail(result)
    print(result.to_json() if args.json else result.to_table())
    return 0


def _bench_server(url: str, plan: Plan) -> BenchResult | str:
    """The result, or why there is none. Loads nothing that only a model needs."""
    from anaphora.server.bench import run_bench
    from anaphora.server.bench_targets import ServerTarget
    from anaphora.server.client import ServerError, TimingClient

    try:
        with TimingClient(url) as client:
            return run_bench(ServerTarget(client, url), plan, _note)
    except ServerError as error:
        return str(error)


def _bench_engine(args: argparse.Namespace, plan: Plan) -> BenchResult | str:
    """The result, or why there is none."""
    from anaphora.engine.request import RequestError
    from anaphora.model import ModelError
    from anaphora.server.bench import run_bench
    from anaphora.server.bench_targets import EngineTarget
    from anaphora.server.loading import OptionError, load_engine

    try:
        _note("loading the model")
        model, engine = load_engine(args.model, _engine_options(args))
        return run_bench(EngineTarget(engine, model.name), plan, _note)
    except (ModelError, RequestError) as error:
        return str(error)
    except OptionError as error:
        return _with_flag(str(error))


def _calibrate(args: argparse.Namespace) -> int:
    from anaphora.engine.calibration import calibrate
    from anaphora.model import ModelError
    from anaphora.server.loading import OptionError, load_engine

    if args.rate is not None and not args.rate > 0:
        return _fail(f"--rate: expected a number above 0, got {args.rate}", code=2)
    try:
        _note("loading the model")
        model, engine = load_engine(args.model, _engine_options(args))
        profile, comparison = calibrate(engine, model.shape, rate_per_s=args.rate, progress=_note)
        profile.save(args.out)
    except (ModelError, OSError) as error:
        return _fail(str(error))
    except OptionError as error:
        return _fail(_with_flag(str(error)))
    print(comparison.to_table())
    _note(f"The profile is in {args.out}.")
    return 0


def _engine_options(args: argparse.Namespace) -> EngineOptions:
    given = {
        "kv_memory_bytes": args.kv_memory,
        "host_kv_memory_bytes": args.host_kv_memory,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_context": args.max_context,
        "index": args.index,
        "executor": args.executor,
        "queue_order": args.queue_order,
        "max_group_overtakes": args.max_group_overtakes,
    }
    options: EngineOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return options


def _with_flag(message: str) -> str:
    """An engine's message about one of its options, with the option as it is called here: --kv-memory."""
    option, rest = message.split(":", 1)
    return f"--{option.removesuffix('_bytes').replace('_', '-')}:{rest}"


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            "expected a number of bytes, or one with K, M, G, T (powers of 1000) or KiB, MiB, GiB, TiB, like 1.5GiB; "
            f"got {text!r}"
        )
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 byte, got {text!r}")
    return size


def _server_url(text: str) -> str:
    """The server's root, also where the base URL of OpenAI's clients is given, which ends in /v1."""
    url = urlsplit(text)
    if url.scheme not in {"http", "https"} or not url.hostname or url.query or url.fragment:
        raise argparse.ArgumentTypeError(f"expected a URL like http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _named_path(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=PATH, got {text!r}")
    return name, path


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, 0 or more, got {text!r}")
    return seconds


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"expected 0 to {_MAX_PORT}, got {text!r}")
    return int(text)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(message: str, code: int = 1) -> int:
    _note(f"anaphora: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())

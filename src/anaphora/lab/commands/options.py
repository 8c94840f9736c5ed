"""Options that several commands share."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from anaphora.lab.encoding import Encoder
    from anaphora.lab.importers import Log, ReadReport

FORMAT_NAMES = (
    "mooncake",
    "bailian",
    "weka",
    "openai-batch",
    "litellm",
    "gateway",
    "claude-code",
    "codex",
    "langfuse",
    "otlp",
    "sharegpt",
    "kv-events",
    "anthropic",
    "openai",
    "burstgpt",
    "azure",
    "vllm",
    "sglang",
    "prometheus",
)
"""Those of `importers.FORMATS`; here, so that `--help` need not load them all."""

PROVIDER_NAMES = ("anthropic", "bedrock", "openai", "openai-explicit", "gemini", "deepseek")
"""Those of `providers/rules.toml`."""

_CAPACITY = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)\s*(blocks|tokens|KiB|MiB|GiB|TiB|)")
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SCALE = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


class Capacity(NamedTuple):
    """Memory of a cache as it was given: so many blocks, tokens or bytes; None for no bound."""

    amount: float | None
    unit: str

    def in_blocks(self, block_size: int, bytes_per_token: int | None, option: str = "--capacity") -> int | None:
        """Whole blocks. ValueError, by the option's name, for bytes of an unknown model, or less than a block."""
        if self.amount is None:
            return None
        tokens = self.amount * (block_size if self.unit == "blocks" else 1)
        if self.unit == "bytes":
            if bytes_per_token is None:
                raise ValueError(f"{option}: a size in bytes needs --model or --kv-bytes-per-token")
            tokens = self.amount / bytes_per_token
        if tokens < block_size:
            raise ValueError(f"{option}: less than one block of {block_size} tokens")
        return int(tokens // block_size)


def capacity(text: str) -> Capacity:
    """Parse 3000, 3000blocks, 3Mtokens, 24GiB or unbounded."""
    if text == "unbounded":
        return Capacity(None, "blocks")
    match = _CAPACITY.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected blocks, tokens or bytes, like 3000, 3Mtokens, 24GiB, or unbounded; got {text!r}"
        )
    amount = float(match[1]) * _SCALE[match[2]]
    if match[3] in _BYTES:
        return Capacity(amount * _BYTES[match[3]], "bytes")
    return Capacity(amount, match[3] or "blocks")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1, or a percentage."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, or 0% to 100%, got {text!r}")
    return value


def add_log(parser: argparse.ArgumentParser, what: str) -> None:
    """The log to read, and how to read it."""
    parser.add_argument("log", metavar=what, help="a log or trace; .gz and .zst are read as they are")
    parser.add_argument("--format", choices=FORMAT_NAMES, metavar="NAME",
                        help=f"instead of detecting it: {', '.join(FORMAT_NAMES)}")  # fmt: skip
    parser.add_argument("--tokenizer", metavar="PATH",
                        help="a model here (GGUF file or folder) to count tokens with (default: estimate)")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="read the first N requests only")


def add_pictures(parser: argparse._ActionsContainer) -> None:
    """Where pictures go. See `lab.images.write_pictures`."""
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="write the pictures there")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="the same as PNG (needs resvg-py)")


def open_log(args: argparse.Namespace) -> tuple[Log, Encoder]:
    """The log, `args.log` made a path, and what makes tokens of its text. Raises LogError."""
    from anaphora.lab.encoding import EstimatingEncoder, ModelEncoder
    from anaphora.lab.importers import open_requests

    args.log = Path(args.log)
    return open_requests(args.log, args.format), ModelEncoder(args.tokenizer) if args.tokenizer else EstimatingEncoder()


def note_report(report: ReadReport) -> None:
    """Say on stderr what could not be read."""
    if report.num_bad:
        named = "; ".join(f"line {line}: {reason}" for line, reason in report.bad[:5])
        more = f"; and {report.num_bad - 5:,} more" if report.num_bad > 5 else ""
        note(f"{report.num_bad:,} bad lines left out: {named}{more}")
    if report.num_duplicates:
        note(f"{report.num_duplicates:,} repeated records counted once")


def note(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def fail(message: str, code: int = 1) -> int:
    """Say why a command ends without a result; return its exit code."""
    note(f"anaphora: {message}")
    return code

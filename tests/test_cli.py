"""The command line, run as users run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from anaphora import KVCacheManager, Namespace
from anaphora.cli import main
from anaphora.identity import VllmDigests
from anaphora.version import __version__
from tests.server.live_server import serving_fake
from tests.server.test_concurrency import eventually
from tests.tiny_models import write_gguf_model

if TYPE_CHECKING:
    from collections.abc import Iterator

ANAPHORA = [sys.executable, "-m", "anaphora.cli"]


def run(*arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [*ANAPHORA, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_model(tmp_path_factory.mktemp("model") / "tiny.gguf", max_context=16_384)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port; yields the process and its URL."""
    command = [*ANAPHORA, "serve", *map(str, arguments), "--port", "0", "--kv-memory", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            banner = process.stdout.readline()
            assert " at http" in banner, process.communicate(timeout=10)
            yield process, banner.split(" at ")[1].split("/v1")[0]
        finally:
            process.kill()


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from anaphora.cli import main\n"
        "try: main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'starlette', 'uvicorn', 'msgspec', 'httpx', 'jinja2', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.splitlines()[-1] == "[]"
    assert "serve" in run("--help").stdout
    assert "bench" in run("--help").stdout


def test_version() -> None:
    assert run("--version").stdout == f"anaphora {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_missing_extra_is_named_with_its_command(command: str) -> None:
    code = f"import sys; sys.modules['tokenizers'] = None; from anaphora.cli import main; sys.exit(main(['{command}']))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    assert completed.stderr == (
        f"anaphora: {command} needs tokenizers, which is not installed: pip install '.[serve]' in a clone of Anaphora\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "70000"], "argument --port: expected 0 to 65535, got '70000'"),
        (
            ["serve", "--kv-memory", "lots"],
            "argument --kv-memory: expected a number of bytes, or one with K, M, G, T "
            "(powers of 1000) or KiB, MiB, GiB, TiB, like 1.5GiB; got 'lots'",
        ),
        (["serve", "--kv-memory", "1PiB"], "KiB, MiB, GiB, TiB, like 1.5GiB; got '1PiB'"),
        (["serve", "--body-limit", "0"], "argument --body-limit: expected at least 1 byte, got '0'"),
        (["bench", "--kv-memory", "0.1"], "argument --kv-memory: expected at least 1 byte, got '0.1'"),
        (["serve", "--max-num-seqs", "0"], "argument --max-num-seqs: expected a whole number from 1 up, got '0'"),
        (["serve", "--index", "btree"], "argument --index: invalid choice: 'btree'"),
        (["bench", "--url", "foo"], "argument --url: expected a URL like http://127.0.0.1:8000, got 'foo'"),
        (["bench", "--url", "http:///v1"], "argument --url: expected a URL like http://127.0.0.1:8000"),
        (["bench", "--repeats", "-1"], "argument --repeats: expected a whole number from 1 up, got '-1'"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("7", 7), ("1kb", 1000), ("2M", 2_000_000), ("1.5GiB", 3 * 2**29), ("1 TiB", 2**40), ("3T", 3 * 10**12)],
)
def test_sizes_have_units(text: str, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr("anaphora.server.serve.serve", lambda options: limits.append(options.body_limit_bytes) or 0)
    assert main(["serve", "--body-limit", text]) == 0
    assert limits == [size_bytes]


def test_calibrate_writes_a_profile_and_says_how_well_it_predicts(tmp_path: Path) -> None:
    model = write_gguf_model(tmp_path / "tiny.gguf", max_context=512)
    out = tmp_path / "profile.json"
    completed = run("calibrate", model, "--executor", "reference", "--kv-memory", "4MiB", "--rate", "50", "--out", out)
    assert completed.returncode == 0, completed.stderr
    assert set(json.loads(out.read_text())) == {
        "name", "span_s", "weight_bytes_per_s", "flops_per_s", "attention_flops_per_s", "kv_bytes_per_s",
        "step_s", "row_s", "host_bytes_per_s",
    }  # fmt: skip
    assert completed.stdout.splitlines()[-1].startswith("48 requests; cached tokens of each: ")


def test_exit_after_demo_without_a_demo_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--exit-after-demo"]) == 2
    assert capsys.readouterr().err == "anaphora: --exit-after-demo needs --demo\n"


def test_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/nowhere/model.gguf", "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("anaphora: model: '/nowhere/model.gguf' is no file or folder here")
    assert error.count("\n") == 1


def test_port_in_use_is_one_line_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "/nowhere/model.gguf", "--port", str(port)]) == 1
    expected = f"anaphora: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    assert capsys.readouterr().err == expected


def test_too_small_a_pool_is_one_line(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_model), "--port", "0", "--kv-memory", "10"]) == 1
    assert capsys.readouterr().err.startswith("anaphora: --kv-memory: 10 is not enough; the least is ")


def test_more_memory_than_the_machine_has_is_one_line(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tiny_model), "--port", "0", "--kv-memory", "9999GiB"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("anaphora: --kv-memory: 9,999.0 GiB is more than the memory of this machine, ")
    assert error.count("\n") == 1


def test_memory_that_the_process_does_not_get_is_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 9.00 GiB")

    monkeypatch.setattr("anaphora.server.loading.build_engine", refuse)
    assert main(["serve", str(tiny_model), "--port", "0"]) == 1
    assert capsys.readouterr().err == "anaphora: --kv-memory: this process does not get that much memory; choose less\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_serve_answers_until_a_signal_and_ends_quietly(tiny_model: Path, number: signal.Signals) -> None:
    with serving(tiny_model, "--max-context", "300") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 300
        body = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).json()
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out.endswith("Stopped.\n")
    assert err == ""


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_ctrl_c_while_the_model_loads_says_so(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("anaphora.server.loading.load_model", interrupt)
    assert main([command, *(["--port", "0"] if command == "serve" else [])]) == 130
    assert capsys.readouterr().err.endswith("\nStopped.\n")


def test_banner_shows_calls_that_work(tiny_model: Path) -> None:
    with serving(tiny_model) as (process, url):
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(9)]
    assert f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n" in lines
    assert f'  client = OpenAI(base_url="{url}/v1", api_key="none")\n' in lines
    assert any(
        'client.chat.completions.create(model="tiny", temperature=0, messages=[{"role": "user"' in line
        for line in lines
    )


def test_ctrl_c_tells_of_the_requests_that_it_waits_for(tiny_model: Path) -> None:
    body = {"model": "tiny", "prompt": [10], "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    with serving(tiny_model) as (process, url), httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("Stopping"))
        assert line == "Stopping: 1 request has 30 s to finish; Ctrl-C again ends it now.\n"
        os.kill(process.pid, signal.SIGINT)
        assert "shutting_down" in list(lines)[-2]
        assert process.wait(10) == 0


def test_no_prefix_caching_computes_everything(tiny_model: Path) -> None:
    body = {"model": "tiny", "prompt": list(range(10, 60)), "max_tokens": 1}
    with serving(tiny_model, "--no-prefix-caching") as (_, url):
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=20).json() for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"] for answer in answers] == [{"cached_tokens": 0}] * 2


def test_demo_can_be_all_there_is(tiny_model: Path) -> None:
    completed = run("serve", tiny_model, "--port", "0", "--demo", "--exit-after-demo", timeout_s=120)
    assert completed.returncode == 0, completed.stderr
    assert "Saved: " in completed.stdout
    assert completed.stdout.endswith("Stopped.\n")
    assert completed.stderr == ""


def test_demo_that_fails_is_an_exit_code(tiny_model: Path) -> None:
    completed = run("serve", tiny_model, "--port", "0", "--max-context", "100", "--demo", "--exit-after-demo")
    assert completed.returncode == 1
    assert completed.stderr.startswith("The demo could not go on: 400: messages: ")
    assert "Traceback" not in completed.stderr


def test_longer_context_than_the_models_is_said_to_be_cut(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anaphora.server.bench.run_bench", lambda *_: "measured")
    arguments = ["bench", str(tiny_model), "--kv-memory", "64MiB", "--max-context"]
    assert main([*arguments, "100000"]) == 1
    assert "--max-context: 100,000 is more than this model's 16,384, which hold" in capsys.readouterr().err
    assert main([*arguments, "16384"]) == 1
    assert "--max-context" not in capsys.readouterr().err


def test_bench_in_process_prints_json(tiny_model: Path) -> None:
    completed = run("bench", tiny_model, "--prefix-tokens", "64", "--suffix-tokens", "8", "--repeats", "1", "--json")
    assert completed.returncode == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result["target"] == "tiny, in process"
    assert [row["cached_tokens"] for row in result["prefixes"]] == [64]


def test_bench_beyond_the_context_is_one_line(tiny_model: Path) -> None:
    completed = run("bench", tiny_model, "--max-context", "50", "--prefix-tokens", "64", "--repeats", "1")
    assert completed.returncode == 1
    assert "the longest context is 50 tokens" in completed.stderr
    assert "warming up" not in completed.stderr
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1"])
def test_bench_of_no_server_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("anaphora: http://127.0.0.1:9: no list of models: ")


def test_bench_takes_the_base_url_of_openais_clients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anaphora.server.bench_targets.ORDINARY_TOKEN_IDS", range(1, 257))
    with serving_fake() as live:
        arguments = ["--prefix-tokens", "40", "--suffix-tokens", "5", "--repeats", "1", "--json"]
        assert main(["bench", "--url", f"{live.url}/v1/", *arguments]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["target"] == f"alphabet at {live.url}"
        assert [row["cached_tokens"] for row in result["prefixes"]] == [32]


def test_bench_of_a_server_loads_nothing_of_a_model() -> None:
    code = (
        "import sys\n"
        "for name in ('jinja2', 'tokenizers', 'gguf', 'safetensors'): sys.modules[name] = None\n"
        "from anaphora.cli import main; sys.exit(main(['bench', '--url', 'http://127.0.0.1:9']))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert completed.stderr.startswith("anaphora: http://127.0.0.1:9: no list of models: ")


def test_a_server_of_a_tiny_model_is_followed_traced_and_stopped(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("zmq")
    from anaphora.wire import EventFollower, FindableNames
    from anaphora.wire.subscriber import EventSubscriber

    trace, any_port = tmp_path / "trace.json", "tcp://127.0.0.1:*"
    options = ("--kv-events", any_port, "--kv-events-replay", any_port, "--trace", str(trace), "--log-format", "json")
    hashes = ("--kv-events-hashes", "vllm-sha256-cbor", "--kv-events-hash-seed", "0")
    body = {"model": "tiny", "prompt": list(range(10, 60)), "max_tokens": 1, "cache_salt": "a secret"}
    names = FindableNames()
    follower = EventFollower(names)
    subscriber = EventSubscriber(lambda: None)
    subscriber.start()
    with serving(tiny_model, *options, *hashes) as (process, url):
        source = httpx.get(f"{url}/kv_event_sources").json()["0"]
        subscriber.add("it", source["endpoint"], source["replay_endpoint"])
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20).status_code == 200

        def is_followed() -> bool:
            follower.take(action for _, action in subscriber.take())
            return subscriber.is_settled("it") and follower.is_whole and len(names.blocks) == 3

        eventually(is_followed)
        subscriber.close()
        manager = KVCacheManager(8, 16, digests=VllmDigests("sha256_cbor", seed="0"))
        sequence = manager.start(list(range(10, 60)), Namespace(salt="a secret"))
        manager.allocate(sequence, 50)
        manager.commit(sequence, 50)
        assert {name[0] for name in names.blocks} == {digest[-8:] for digest in manager.block_digests(sequence)}
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        logged = process.stderr.read()
    assert [json.loads(line)["prompt_tokens"] for line in logged.splitlines()] == [50]
    assert '"name":"step"' in trace.read_text()
    assert "secret" not in logged + trace.read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--kv-events-replay", "tcp://127.0.0.1:*"], "anaphora: --kv-events-...: needs --kv-events"),
        (["--kv-events-hashes", "vllm-sha256"], "anaphora: --kv-events-hashes: vLLM's names need --kv-events, in "
                                                "vLLM's format"),
        (["--kv-events-hash-seed", "0"], "anaphora: --kv-events-hashes: a seed belongs to vLLM's names; choose "
                                         "vllm-sha256 or vllm-sha256-cbor"),
        (["--kv-events", "--kv-events-hashes", "vllm-xxhash", "--kv-events-hash-seed", "0"],
         "anaphora: --kv-events-hashes: vllm-xxhash with a seed is a digest that anybody can compute and collide, so "
         "that one tenant may be told of, or given, what is another's. Choose vllm-sha256 or vllm-sha256-cbor, set no "
         "--kv-events-hash-seed (nor PYTHONHASHSEED), or add --kv-events-unsafe-hashes if all who send prompts are "
         "trusted"),
        (["--kv-events", "nowhere"], "anaphora: --kv-events: nowhere: Invalid argument"),
        (["--trace", "/no/such/folder/t"], "anaphora: --trace: /no/such/folder/t: No such file or directory"),
        (["--api-keys", "/no/such/file"], "anaphora: --api-keys: /no/such/file: No such file or directory"),
        (["--demo", "--api-keys", "x"], "anaphora: --demo has no key; leave out --api-keys"),
        (["--drain-timeout", "-1"], "anaphora serve: error: argument --drain-timeout: expected seconds, 0 or more, "
                                    "got '-1'"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_had_are_one_clear_line(options: list[str], problem: str) -> None:
    completed = run("serve", "--port", "0", *options)
    assert completed.returncode in {1, 2}
    assert completed.stderr.splitlines()[-1] == problem
